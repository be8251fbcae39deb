"""A bucket as the medium of a segment tier, through obstore.

Calls are coroutines on one event loop in a thread of its own. `asyncio.wait_for` ends each by its
deadline and closes its connection; obstore's own timeout takes much longer. A put is one request,
which overwrites: it may be repeated. A read that is late is hedged once. Over plain HTTP, objects
and ranges of S3 stores move without obstore (`direct_client`).
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

import numpy as np
import obstore
from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from holdfast.errors import Outcome, printable
from holdfast.tiers.object.direct_client import DirectClient, Hedging, Method
from holdfast.tiers.object.probe import BUCKET_REFUSAL, probe_store
from holdfast.tiers.object.store import ABSENT, Store
from holdfast.tiers.pool.hedged_read import HedgeBudget
from holdfast.tiers.segments.medium import MediumAnswer, MediumProbe, MediumRequests
from holdfast.wire.remote.stream import Deadline

if TYPE_CHECKING:
    from holdfast.tiers.object.kind import ObjectOptions

HEDGE_MIN_S = 0.05
"""A read is hedged after this time at the earliest, in seconds."""

HEDGE_SAMPLES = 128
"""Recent reads by which a late one is known."""

HEDGE_SAMPLES_MIN = 20

DELETE_MAX = 1_000
"""Most names in one bulk deletion."""

PRICE_PER_1000 = {"get": 0.0004, "put": 0.005, "list": 0.005, "delete": 0.0}
"""Dollars per 1,000 requests of each verb; a deletion is free."""

CLOSE_S = 2.0
_CANCEL_S = 1.0
"""Time at `close` in which the requests under way, which are cancelled, end."""
_LET_GO_S = 0.1
"""Pause at the end of `close`. obstore's threads let go of Python objects a moment after a call has
ended; if the interpreter ends before, the process aborts. Measured: milliseconds."""

SIGNED_S = 900.0
"""Validity of a signed URL, in seconds: longer than any call."""

DIRECT_PAUSE_S = 60.0
"""Time without `direct_client` after a store has answered obstore only, in seconds."""

_LIST_NAMES = 1_000
"""Names in one answer to a listing."""

_LATE_SHARE = 0.95
_LATE_FACTOR = 1.5
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_REQUEST = re.compile(r"Error performing ([A-Z]+) (\S+) in \S+?(?:, after [^-]*)? - (.*)")
_STATUS = "Server returned non-2xx status code: "
_UNSENT = "error sending request"
_NO_CONNECTION = "no connection to the store, or it ended"
_METADATA = "//169.254.169.254/", "//metadata.google.internal/"
"""Addresses that obstore asks for the machine's credentials, if it was given none."""
_NO_CREDENTIALS = (
    "no credentials found: name a credentials_file, or set them in the environment; the machine's "
    "metadata service gave none either"
)
_QUERY = re.compile(r"\?[^\s\"')]*")
_SECRET = re.compile(r"(?i)(signature|credential|token|secret|accountkey)([\"'=: ]+)[^\s&\"',]+")
_FULL = (
    "status code: 507",
    "QuotaExceeded",
    "InsufficientStorage",
    "StorageFull",
    "XMinioStorageFull",
)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_PAST_END = (
    "status code: 416",
    "InvalidRange",
    "Range Not Satisfiable",
    "greater than or equal to",
)


class ObjectMedium:
    """See `holdfast.tiers.segments.medium.SegmentMedium`."""

    def __init__(self, store: Store, options: ObjectOptions, name: str) -> None:
        self._store = store
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._durations_s: deque[float] = deque(maxlen=HEDGE_SAMPLES)
        self._late_s: float | None = None
        self._hedges = HedgeBudget()
        idle_max = options.connections + options.write_connections
        self._requests: Counter[str] = Counter()
        """Requests since start, by verb."""
        self._requests_lock = threading.Lock()
        self._direct = (
            DirectClient(self._sign, lambda method: self._count(method.lower()), idle_max)
            if isinstance(store, S3Store)
            and options.endpoint.startswith("http://")
            and not getproxies()
            else None
        )
        self._direct_at_s = 0.0
        """When requests are sent without obstore again, in monotonic seconds."""
        self._close_lock = threading.Lock()
        self._calls = set[Future[MediumAnswer]]()
        """Those that run on the loop."""
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"holdfast-{name}-loop", daemon=True
        )
        self._thread.start()

    def put(self, name: str, parts: Sequence[memoryview], deadline: Deadline) -> MediumAnswer:
        if self._uses_direct():
            try:
                if self._direct is not None and self._direct.put(name, parts, deadline):
                    return MediumAnswer(Outcome.OK)
            except TimeoutError:
                return MediumAnswer(Outcome.LATE, why="no answer by the deadline")
        answer = self._put_with_obstore(name, parts, deadline)
        if answer.outcome is Outcome.OK:
            self._direct_at_s = time.monotonic() + DIRECT_PAUSE_S
        return answer

    def _put_with_obstore(
        self, name: str, parts: Sequence[memoryview], deadline: Deadline
    ) -> MediumAnswer:
        data: Any = parts[0] if len(parts) == 1 else list(parts)

        async def put() -> MediumAnswer:
            self._count("put")
            await obstore.put_async(self._store, name, data, use_multipart=False)
            return MediumAnswer(Outcome.OK)

        return self._call(put(), deadline)

    def read(
        self, name: str, start: int, into: Sequence[memoryview], deadline: Deadline
    ) -> MediumAnswer:
        self._hedges.request()
        if (answer := self._read_directly(name, start, into, deadline)) is not None:
            return answer
        answer = self._read_with_obstore(name, start, into, deadline)
        if answer.nbytes:
            self._direct_at_s = time.monotonic() + DIRECT_PAUSE_S
        return answer

    def _read_directly(
        self, name: str, start: int, into: Sequence[memoryview], deadline: Deadline
    ) -> MediumAnswer | None:
        """Read without obstore; None if the store has to be asked with obstore."""
        begun_s = time.monotonic()
        if self._direct is None or not self._uses_direct():
            return None
        late_s = self._late_s
        hedging = Hedging(late_s, self._hedges.take) if late_s is not None else None
        try:
            nbytes = self._direct.read(name, start, into, deadline, hedging)
        except TimeoutError:
            return MediumAnswer(Outcome.LATE, why="no answer by the deadline")
        if nbytes is None:
            return None
        self._note_duration(time.monotonic() - begun_s)
        return MediumAnswer(Outcome.OK, nbytes)

    def _read_with_obstore(
        self, name: str, start: int, into: Sequence[memoryview], deadline: Deadline
    ) -> MediumAnswer:
        wanted = sum(map(len, into))
        begun_s = time.monotonic()
        found: list[Any] = []

        async def read() -> MediumAnswer:
            try:
                found.append(await self._get_hedged(name, start, wanted))
            except ABSENT:
                raise
            except BaseError as error:
                if any(words in str(error) for words in _PAST_END):
                    return MediumAnswer(Outcome.OK)
                raise
            return MediumAnswer(Outcome.OK, len(found[0]))

        answer = self._call(read(), deadline)
        if answer.outcome is Outcome.OK and found:
            self._note_duration(time.monotonic() - begun_s)
            if answer.nbytes > wanted:
                return MediumAnswer(Outcome.GONE, why="the store sent more bytes than were asked")
            _scatter(found[0], into)
        return answer

    def list(self, prefix: str, deadline: Deadline) -> MediumAnswer:
        async def names() -> MediumAnswer:
            found: list[str] = []
            stream = obstore.list(self._store, prefix=prefix or None, chunk_size=_LIST_NAMES)
            self._count("list")
            async for chunk in stream:
                if len(chunk) == _LIST_NAMES:
                    self._count("list")
                found += (str(each["path"]) for each in chunk)
            return MediumAnswer(Outcome.OK, names=sorted(found))

        answer = self._call(names(), deadline)
        if answer.outcome is Outcome.MISS:
            return MediumAnswer(Outcome.GONE, why=answer.why)
        return answer

    def delete(self, names: Sequence[str], deadline: Deadline) -> MediumAnswer:
        async def delete() -> MediumAnswer:
            for at in range(0, len(names), DELETE_MAX):
                await self._delete([*names[at : at + DELETE_MAX]])
            return MediumAnswer(Outcome.OK)

        return self._call(delete(), deadline)

    def probe(self, deadline: Deadline) -> MediumProbe:
        found: list[MediumProbe] = []

        async def probe() -> MediumAnswer:
            found.append(await probe_store(self._store, self._options.url))
            return MediumAnswer(Outcome.OK)

        answer = self._call(probe(), deadline)
        if answer.outcome is Outcome.MISS:  # what was put is not there
            answer = MediumAnswer(Outcome.GONE, why=answer.why)
        return found[0] if found else MediumProbe(answer.outcome, why=answer.why)

    def requests(self) -> MediumRequests:
        with self._requests_lock:
            by_verb = {verb: self._requests[verb] for verb in PRICE_PER_1000}
        return MediumRequests(by_verb, request_dollars(by_verb))

    def describe(self) -> dict[str, Any]:
        requests = self.requests()
        return {
            "address": self._options.url,
            "endpoint": self._options.endpoint,
            "requests": dict(requests.by_verb),
            "hedges": self._hedges.hedges,
            "request_dollars": round(requests.dollars, 6),
        }

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        if self._direct is not None:
            self._direct.close()

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CANCEL_S)
            self._loop.call_later(0.0, self._loop.stop)

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(CLOSE_S)
        for call in list(self._calls):  # that the loop has ended without: its caller waits
            call.cancel()
        if not self._thread.is_alive():
            self._loop.close()
        time.sleep(_LET_GO_S)

    def _count(self, verb: str) -> None:
        with self._requests_lock:
            self._requests[verb] += 1

    def _uses_direct(self) -> bool:
        """Return whether requests are sent without obstore now."""
        is_allowed = self._direct is not None and not self._closed
        return is_allowed and time.monotonic() >= self._direct_at_s

    def _sign(self, method: Method, name: str, deadline: Deadline) -> str:
        """Return a signed URL for a request; empty if there is none in time."""
        found: list[str] = []

        async def sign() -> MediumAnswer:
            valid = timedelta(seconds=SIGNED_S)
            found.append(await obstore.sign_async(self._store, method, name, valid))
            return MediumAnswer(Outcome.OK)

        self._call(sign(), deadline)
        return found[0] if found else ""

    def _call(self, work: Coroutine[Any, Any, MediumAnswer], deadline: Deadline) -> MediumAnswer:
        """Run a coroutine on the loop; return its answer, or what its failure means."""
        left_s = deadline.at - time.monotonic()
        with self._close_lock:
            if self._closed or left_s <= 0:
                work.close()
                outcome = Outcome.GONE if self._closed else Outcome.LATE
                return MediumAnswer(outcome, why="closed" if self._closed else "too late to begin")
            waiting = asyncio.wait_for(work, left_s)
            call = asyncio.run_coroutine_threadsafe(waiting, self._loop)
            self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return call.result()
        except TimeoutError:
            return MediumAnswer(Outcome.LATE, why="no answer by the deadline")
        except (CancelledError, asyncio.CancelledError):
            return MediumAnswer(Outcome.GONE, why="closed")
        except (BaseError, OSError, ValueError) as error:
            why = failure_words(error)
            if has_no_bucket(error):
                why = BUCKET_REFUSAL.format(url=self._options.url)
            return MediumAnswer(failure_outcome(error), why=why)

    async def _get_hedged(self, name: str, start: int, nbytes: int) -> Any:  # noqa: ANN401
        """Return a range; ask a second time, once, if the first request is late."""
        first = asyncio.ensure_future(self._get(name, start, nbytes))
        tasks = {first}
        try:
            if (late_s := self._late_s) is not None:
                done, _ = await asyncio.wait(tasks, timeout=late_s)
                if not done and self._hedges.take():
                    tasks.add(asyncio.ensure_future(self._get(name, start, nbytes)))
            left = set(tasks)
            while True:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not left or task.exception() is None:
                        return task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _get(self, name: str, start: int, nbytes: int) -> Any:  # noqa: ANN401  # obstore's
        self._count("get")
        return await obstore.get_range_async(self._store, name, start=start, length=nbytes)

    async def _delete(self, names: Sequence[str]) -> None:
        """Delete up to 1,000 objects; one by one on a store that reports absent ones."""
        self._count("delete")
        try:
            await obstore.delete_async(self._store, [*names])
        except ABSENT:
            for name in names:
                try:
                    await obstore.delete_async(self._store, name)
                except ABSENT:
                    continue

    def _note_duration(self, seconds: float) -> None:
        with self._requests_lock:
            self._durations_s.append(seconds)
            ordered = sorted(self._durations_s)
        if len(ordered) >= HEDGE_SAMPLES_MIN:
            late_s = _LATE_FACTOR * ordered[int(_LATE_SHARE * len(ordered))]
            self._late_s = max(HEDGE_MIN_S, late_s)


def request_dollars(requests: Mapping[str, int]) -> float:
    """Return the list price of requests, by verb, at Amazon S3 Standard (us-east-1, 2026)."""
    return sum(PRICE_PER_1000[verb] * count / 1_000 for verb, count in requests.items())


def failure_outcome(error: Exception) -> Outcome:
    """Return what an exception of obstore means."""
    words = str(error)
    if isinstance(error, ABSENT) and not has_no_bucket(error):
        return Outcome.MISS
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return Outcome.GONE
    if any(sign in words for sign in _FULL):
        return Outcome.FULL
    if "timed out" in words or "TimedOut" in words:
        return Outcome.LATE
    return Outcome.GONE


def has_no_bucket(error: Exception) -> bool:
    """Return whether an exception of obstore means that the bucket does not exist."""
    return isinstance(error, ABSENT) and any(sign in str(error) for sign in _NO_BUCKET)


def failure_words(error: Exception) -> str:
    """Return an exception of obstore as one line, without signatures and keys.

    It begins with what the store answered: of an XML body, code and message.
    """
    line = " ".join(str(error).partition("Debug source:")[0].split()) or type(error).__name__
    said = [match[1] for tag in (_CODE, _MESSAGE) if (match := tag.search(line))]
    if request := _REQUEST.search(line):
        verb, url, answer = request.groups()
        status = answer.partition("<")[0].removeprefix(_STATUS).rstrip(" :")
        answer = ": ".join(said) or (_NO_CONNECTION if _UNSENT in answer else status)
        line = f"{answer}{f', {status}' if said else ''}; {verb} {url}"
        if any(address in url for address in _METADATA):
            line = f"{_NO_CREDENTIALS} ({line})"
    return printable(_SECRET.sub(r"\1\2...", _QUERY.sub("?...", line)))


def _scatter(data: Any, into: Sequence[memoryview]) -> None:  # noqa: ANN401  # obstore's bytes
    """Copy consecutive pieces of `data` into buffers; each copy releases the GIL."""
    source = np.frombuffer(data, np.uint8)
    at = 0
    for part in into:
        piece = source[at : at + len(part)]
        if not len(piece):
            return
        np.copyto(np.frombuffer(part, np.uint8)[: len(piece)], piece)
        at += len(piece)
