"""Exceptions of Holdfast, outcomes of blocks and requests, and why a plan was not followed.

Also `printable`, which makes text from outside this process fit for a log or a terminal.
"""

from __future__ import annotations

import enum

FOREIGN_TEXT_CHARS_MAX = 300
"""Maximum characters of a peer's text in logs and errors."""


def printable(text: object, chars_max: int | None = FOREIGN_TEXT_CHARS_MAX) -> str:
    """Return text of another program as one line of printable characters.

    Others are written as escapes: control characters, line ends, marks that change the direction of
    writing, lone surrogates. So no text moves a terminal's cursor or begins a line of a log. Call
    it where the text is taken in.
    """
    kept = str(text)[:chars_max]
    if kept.isprintable():
        return kept
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in kept)


class Outcome(enum.StrEnum):
    """The result of one block or one request; never an exception.

    A failure is counted by its outcome and shown by `doctor`; the user's request does not fail,
    its blocks are recomputed.
    """

    OK = "ok"
    MISS = "miss"
    FULL = "full"
    LATE = "late"
    UNSENT = "unsent"
    """A request to another node was not sent, because this node has too many under way."""
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """A complete record that this host cannot open or must not trust; other hosts may read it."""
    GONE = "gone"


class NotFollowed(enum.StrEnum):
    """Why a plan was not carried out, so that its times do not count for its accuracy."""

    HAD = "engine_had_it"
    """The engine had more of the prompt in its own cache than it had reported."""
    LOST = "engine_lost_it"
    """The engine had less of the prompt in its own cache than it had reported."""
    LATE = "answered_late"
    """The node's answer came after the engine had stopped waiting for it."""
    NOT_FETCHED = "not_fetched"
    """The plan was to fetch, and the engine did not fetch."""
    PREEMPTED = "preempted"
    """The engine preempted the request before its first token."""
    ENDED = "request_ended"
    """The request ended before its first token."""
    RESET = "engine_reset"
    """The engine reset its caches."""
    GONE = "engine_gone"
    """The connection between engine and node ended before the request's first token."""
    OTHER = "other"


class HoldfastError(Exception):
    """Root of every error raised by Holdfast. The message names value, limit and remedy.

    It is one printable line, whatever text of another program or file it contains.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), None)


class ConfigError(HoldfastError):
    """A setting is missing, unknown or out of range; the message starts with its key path."""


class FormatError(HoldfastError):
    """A file or folder is not Holdfast's, or is of another version; it is left untouched."""


class UnknownFormatError(FormatError):
    """A record's header is intact, but of an earlier or later format than this build reads."""


class CodecMismatchError(HoldfastError):
    """A codec's result does not decode to the bytes that it was given, so it must not be stored."""


class BusyError(HoldfastError):
    """A folder or socket is in use by another node."""


class BlockError(HoldfastError, ValueError):
    """A block, key, fingerprint or other argument of the caller has the wrong type or shape."""


class StoreClosedError(HoldfastError):
    """The store was closed, or opened by the process that this one was forked from."""


class ProtocolError(HoldfastError):
    """The peer of a connection sent something that the protocol does not allow."""


class NodeGoneError(HoldfastError):
    """The node did not answer within the deadline, or the connection broke."""


class UntrustedPeerError(NodeGoneError):
    """Another user may own the process at the node's socket, so nothing was sent to it."""


class RefusedError(HoldfastError):
    """The node understood a request and refuses it; the message is the node's."""


class MembershipError(HoldfastError):
    """A list of pool members cannot be read or is invalid; the last one stays in force."""


class TraceError(HoldfastError, ValueError):
    """A trace cannot be read; the message names the file, the line, the error and the remedy."""
