"""Every error and every outcome that Holdfast names."""

from __future__ import annotations

import enum


class Outcome(enum.StrEnum):
    """What became of one block, or of one request; never an exception.

    A failure is an outcome with a name: it is counted, shown by `doctor`, and never reaches the
    user's request, which recomputes instead.
    """

    OK = "ok"
    MISS = "miss"
    FULL = "full"
    LATE = "late"
    UNSENT = "unsent"
    """A request to another node was given up before it was sent, as too many of ours go there."""
    CORRUPT = "corrupt"
    GONE = "gone"


class HoldfastError(Exception):
    """Root of every error raised by Holdfast. The message names value, limit and remedy."""


class ConfigError(HoldfastError):
    """A setting is missing, unknown or out of range; the message starts with its key path."""


class FormatError(HoldfastError):
    """A file or folder is not ours, or of another version; it is left untouched."""


class BusyError(HoldfastError):
    """A folder or socket is in use by another node."""


class BlockError(HoldfastError, ValueError):
    """A block, key or fingerprint handed to Holdfast has the wrong shape."""


class ProtocolError(HoldfastError):
    """The other side of a connection sent something the protocol does not allow."""


class NodeGoneError(HoldfastError):
    """The node did not answer within the deadline, or the connection broke."""


class StrangerError(NodeGoneError):
    """Another user may stand behind the node's socket, so nothing was said to them."""


class RefusedError(HoldfastError):
    """The node understood a request and will not serve it; the message is the node's."""


class MembershipError(HoldfastError):
    """A list of pool members can not be had or makes no sense; the last one stays in force."""


class TraceError(HoldfastError, ValueError):
    """A trace can not be read; the message names file and line, what is wrong and the remedy."""
