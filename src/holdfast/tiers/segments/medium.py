"""The medium of a segment tier: a bucket, or a folder that several hosts mount.

A medium keeps *objects*: bytes under a name that is written once. It interprets neither names nor
bytes. `SegmentTier` decides what to write, read and delete, and verifies what it gets.
`holdfast.testing.medium_contract` tests the promises below.

Faults are outcomes, never exceptions: OK, MISS (no such object), LATE (no answer by the deadline),
GONE (an error, or no access) and FULL (the medium takes no more bytes). An answer other than OK and
MISS says why in words for a log, which contain no credentials.

Names: relative paths of 1 to 8 parts separated by `/`; a part has 1 to 64 of the characters
`0-9 a-z -`. A medium has a root of its own (a bucket's prefix, a folder), which no name contains.
Ownership: the caller owns the buffers. After a call returned, whatever its outcome, the medium
writes to no buffer of it. Threads: every method may be called from any thread, in parallel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from holdfast.errors import Outcome
from holdfast.finding import Finding
from holdfast.wire.remote.stream import Deadline

NAME = re.compile(r"[0-9a-z-]{1,64}(/[0-9a-z-]{1,64}){0,7}")
"""Names of objects; also prefixes of `list`, which end at a `/` that is left out."""


class MediumAnswer(NamedTuple):
    """The answer to one call; `nbytes` of a read, `names` of a listing, sorted, `why` of a failure.

    `nbytes`: bytes that were read from the start of the range; fewer than wanted if the object ends
    before, which is OK.
    """

    outcome: Outcome
    nbytes: int = 0
    names: Sequence[str] = ()
    why: str = ""


class MediumRequests(NamedTuple):
    """Requests to a medium since start, by verb, and their list price in dollars.

    No verb: requests to the medium are not paid.
    """

    by_verb: Mapping[str, int] = {}
    dollars: float = 0.0


class MediumProbe(NamedTuple):
    """What a probe found: lines for `holdfast doctor`, and why the medium must not be used.

    `outcome` is OK if the medium answered. `refusal` is empty if the medium can be used; otherwise
    it names what the medium does wrong, and the remedy. `read_only`: why nothing can be written, if
    the medium permits reads only.
    """

    outcome: Outcome
    refusal: str = ""
    findings: Sequence[Finding] = ()
    why: str = ""
    read_only: str = ""


@runtime_checkable
class SegmentMedium(Protocol):
    """See the module's docstring for outcomes, names, ownership and threads."""

    def put(self, name: str, parts: Sequence[memoryview], deadline: Deadline) -> MediumAnswer:
        """Write an object of these parts, joined, and publish it whole; OK if it is stored.

        A reader sees all of the object or nothing. After another outcome the object may exist or
        not; the caller uses its name for no other bytes. The same bytes may be put again.
        """
        ...

    def read(
        self, name: str, start: int, into: Sequence[memoryview], deadline: Deadline
    ) -> MediumAnswer:
        """Read the range from byte `start` into consecutive buffers.

        The range ends where the buffers do, or at the end of the object if that is earlier. Unless
        the answer is OK, the content of the buffers is undefined. A medium that hedges reads sends
        its second request from here.
        """
        ...

    def list(self, prefix: str, deadline: Deadline) -> MediumAnswer:
        """Return the names of all objects below `prefix`, a name without its last `/`; "" for all.

        A prefix without objects is OK and empty.
        """
        ...

    def delete(self, names: Sequence[str], deadline: Deadline) -> MediumAnswer:
        """Delete objects; a name without an object is OK."""
        ...

    def probe(self, deadline: Deadline) -> MediumProbe:
        """Find out what the medium does, by objects below `probe/`, which are deleted at the end.

        Called at start, and by `holdfast doctor` on a bucket.
        """
        ...

    def requests(self) -> MediumRequests:
        """Return the requests that were sent since start, if they are paid."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return plain data for display, such as the address; asks no server."""
        ...

    def close(self) -> None:
        """End calls in progress within about 2 s and release everything; later calls are GONE."""
        ...
