"""An exception at any line of save, fetch and close leaves a store that works and ends."""

import gc
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import HoldfastError, Outcome
from holdfast.store import promote
from holdfast.testing.embedded import (
    BLOCKS,
    FINGERPRINT,
    await_nothing_held,
    blocks_for,
    serves,
    tokens_for,
)
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView

SOURCE = str(Path(holdfast.__file__).parent)


@pytest.fixture(autouse=True)
def _no_callbacks_of_the_collector():
    """Python drops what a signal handler raises in a callback of the garbage collector."""
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


class InjectedError(BaseException):
    """Stands for what a signal handler raises."""


class Interrupter:
    """Raises at the n-th line of holdfast's code that this thread runs in a `with` block."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.fired = False

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, _event, _argument):
        return self._line if frame.f_code.co_filename.startswith(SOURCE) else None

    def _line(self, _frame, event, _argument):
        if event == "line":
            self.left -= 1
            if not self.left:
                self.fired = True
                raise InjectedError
        return self._line


def interrupted(work, limit: int = 10_000):
    """Call `work(n)` with an exception at line n, for every n that there is; yield each n."""
    for at in range(1, limit):
        interrupter = Interrupter(at)
        try:
            with interrupter:
                work(at)
        except InjectedError:
            pass
        yield at
        if not interrupter.fired:
            return
    raise AssertionError(f"more than {limit} lines")


def test_an_exception_at_every_line_of_a_save_leaves_it_whole_or_undone() -> None:
    with holdfast.open(host="64 MiB") as store:
        session = store.session(FINGERPRINT)
        blocks = np.zeros_like(blocks_for(0))

        def save(at: int) -> None:
            blocks[:] = blocks_for(at)
            session.save(tokens_for(at), blocks)

        lines = 0
        for at in interrupted(save):
            blocks[:] = 7  # the caller uses its memory again as soon as the call is over
            lines = at
            await_nothing_held(store)
            found = np.zeros_like(blocks)
            landed = session.fetch(tokens_for(at), into=found)
            assert landed.blocks in (0, BLOCKS)
            assert (found[: landed.blocks] == blocks_for(at)[: landed.blocks]).all()
            serves(session, 10_000 + at)
        assert lines > 20


@pytest.mark.parametrize("below", [False, True])
def test_an_exception_at_every_line_of_a_fetch_loses_no_lease(below, tmp_path) -> None:
    disk = {"disk": "64 MiB", "path": str(tmp_path)} if below else {}
    with holdfast.open(host="16 MiB", **disk) as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(blocks_for(1))
        serves(session, 1)

        def fetch(_at: int) -> None:
            session.fetch(tokens_for(1), into=found)

        lines = 0
        for at in interrupted(fetch):
            found[:] = 7
            time.sleep(0.001)
            assert (found == 7).all(), "written into after the call was over"
            lines = at
            await_nothing_held(store)
            serves(session, 1)
            if below:
                leave_memory(store)
        assert lines > 20


def await_written(store) -> None:
    StoreView(store).wait_until_written()


def leave_memory(store) -> None:
    await_written(store)
    leave_all(store)


def test_a_close_that_is_interrupted_at_any_line_ends_and_can_be_called_again(tmp_path) -> None:
    store, lines = None, 0

    def close(_at: int) -> None:
        store.close()

    def opened():
        one = holdfast.open(host="16 MiB", disk="16 MiB", path=str(tmp_path))
        one.session(FINGERPRINT).save(tokens_for(1), blocks_for(1))
        return one

    store = opened()
    for at in interrupted(close):
        lines = at
        store.close()
        store = opened()  # the folder's lock is free again
    store.close()
    assert lines > 3


def test_signals_that_raise_in_a_loop_of_saves_and_fetches_break_nothing() -> None:
    rng, times = random.Random(17), 0

    def raise_it(*_):
        raise InjectedError

    before = signal.signal(signal.SIGALRM, raise_it)
    store = holdfast.open(host="16 MiB")
    try:
        session, blocks = store.session(FINGERPRINT), np.zeros_like(blocks_for(0, 16))
        for at in range(400):
            seed = at % 50
            blocks[:] = blocks_for(seed, 16)
            found = np.zeros_like(blocks)
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
                session.save(tokens_for(seed, 16), blocks)
                landed = session.fetch(tokens_for(seed, 16), into=found)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InjectedError:
                times += 1
            else:
                assert (found[: landed.blocks] == blocks_for(seed, 16)[: landed.blocks]).all()
            blocks[:] = 7
            landed = session.fetch(tokens_for(seed, 16), into=found)
            assert (found[: landed.blocks] == blocks_for(seed, 16)[: landed.blocks]).all()
        await_nothing_held(store)
        serves(session, 99)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        store.close()
    assert times > 20


def test_signals_that_raise_while_a_store_closes_do_not_keep_it_open(tmp_path) -> None:
    def raise_it(*_):
        raise InjectedError

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        for at in range(30):
            store = holdfast.open(host="16 MiB", disk="16 MiB", path=str(tmp_path))
            session = store.session(FINGERPRINT)
            session.save(tokens_for(at), blocks_for(at))
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 * (1 + at))
                store.close()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InjectedError:
                pass
            store.close()
            found = np.zeros_like(blocks_for(at))
            assert session.fetch(tokens_for(at), into=found).outcome is Outcome.GONE
            with pytest.raises(HoldfastError, match="closed"):
                session.save(tokens_for(at), blocks_for(at))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


LARGE = 640
"""Blocks of a larger context; the memory of the store holds three."""

BATCH_BYTES = 1 << 20
"""Of a read batch in these tests: a larger context takes six."""

POINTS = 60
"""Interruptions that a test of larger contexts samples."""
OPENS = 24
"""Interruptions of `open`, which takes and closes all memory each time."""


def run_interrupted(work, rng: random.Random, lines: int, seconds: float) -> bool:
    """Call `work` with one exception at a line, or at a time, that the seed chooses.

    Return whether the exception came before the call was over.
    """
    if rng.random() < 0.5:
        interrupter = Interrupter(rng.randint(1, lines))
        try:
            with interrupter:
                work()
        except InjectedError:
            return True
        return False

    def raise_it(_, frame):
        while frame is not None:
            if frame.f_code.co_filename.startswith(SOURCE):
                raise InjectedError
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, seconds))
        work()
    except InjectedError:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False


def lines_and_seconds(work) -> tuple[int, float]:
    """Return how many lines of holdfast a call runs in this thread, and how long it takes."""
    counter = Interrupter(10**9)
    began_s = time.monotonic()
    work()
    seconds = time.monotonic() - began_s
    with counter:
        work()
    return 10**9 - counter.left, seconds


@pytest.fixture
def configured(tmp_path):
    """Return the file of a store with a sealed domain, little memory and a disk."""
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_bytes(b"k" * 32)
    file = tmp_path / "host.yaml"
    file.write_text(f"""
listen: unix://{tmp_path}/holdfast.sock
domains:
  default: {{key_file: {tmp_path}/key}}
keyring: {tmp_path}/ring.json
tiers:
  - {{kind: host, capacity: 16 MiB}}
  - {{kind: disk, path: {tmp_path}/tier, capacity: 256 MiB}}
""")
    return str(file)


def serves_large(session, seed: int, *, saved: bool) -> None:
    """Fetch a larger context; what comes is right, and all of it comes if it was `saved`."""
    found = np.zeros_like(blocks_for(seed, LARGE))
    landed = session.fetch(tokens_for(seed, LARGE), into=found, deadline_s=30.0)
    assert (found[: landed.blocks] == blocks_for(seed, LARGE)[: landed.blocks]).all()
    assert not saved or landed.blocks == LARGE, landed


@pytest.mark.parametrize("seed", [17, 18])
def test_larger_contexts_survive_interruptions_at_sampled_points(
    seed, configured, monkeypatch
) -> None:
    monkeypatch.setattr(promote, "BATCH_BYTES", BATCH_BYTES)
    rng, times = random.Random(seed), {"save": 0, "fetch": 0}
    with holdfast.open(configured) as store:
        session, blocks = store.session(FINGERPRINT), np.zeros_like(blocks_for(0, LARGE))
        found = np.zeros_like(blocks)
        for at in (900, 901, 902):
            session.save(tokens_for(at, LARGE), blocks_for(at, LARGE))
            await_written(store)

        def save(at: int) -> None:
            blocks[:] = blocks_for(at, LARGE)
            session.save(tokens_for(at, LARGE), blocks)

        def fetch(at: int) -> None:
            session.fetch(tokens_for(at, LARGE), into=found)

        costs = {"save": lines_and_seconds(lambda: save(900)),
                 "fetch": lines_and_seconds(lambda: fetch(901))}  # fmt: skip
        for at in range(POINTS // 2):
            times["save"] += run_interrupted(lambda at=at: save(at), rng, *costs["save"])
            blocks[:] = 7  # the caller uses its memory again as soon as the call is over
            serves_large(session, at, saved=False)
            known = rng.choice((900, 901, 902))
            times["fetch"] += run_interrupted(lambda at=known: fetch(at), rng, *costs["fetch"])
            found[:] = 7
            await_nothing_held(store)
            assert (found == 7).all(), "written into after the call was over"
        for at in (900, 901, 902):
            serves_large(session, at, saved=True)
        await_written(store)
        session.save(tokens_for(903, LARGE), blocks_for(903, LARGE))
        serves_large(session, 903, saved=True)
        assert store.status().tiers[1].records, "nothing came to the disk"
    assert min(times.values()) >= 5, times


def holdings() -> tuple[int, int, set[str]]:
    """Return what this process has of a store: open files, mappings of arenas, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    threads = {one.name for one in threading.enumerate() if one.name.startswith("holdfast")}
    return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:"), threads


def await_holdings(wanted: tuple[int, int, set[str]]) -> None:
    until = time.monotonic() + 60
    while (found := holdings()) != wanted:
        assert time.monotonic() < until, (found, wanted)
        time.sleep(0.002)


def test_an_open_that_is_interrupted_leaves_nothing_and_a_second_one_works(configured) -> None:
    rng, times = random.Random(17), 0
    with holdfast.open(configured) as store:
        serves(store.session(FINGERPRINT), 1)
    before = holdings()
    lines, seconds = lines_and_seconds(lambda: holdfast.open(configured).close())
    for at in range(OPENS):
        opened = []
        if run_interrupted(lambda to=opened: to.append(holdfast.open(configured)), rng,
                           lines, seconds):  # fmt: skip
            times += 1
        for store in opened:
            store.close()
        if at % 3:  # else the next one comes while this one is still being closed
            await_holdings(before)
        else:
            with holdfast.open(configured) as store:
                assert store.recovery.wait(60)
                serves(store.session(FINGERPRINT), 1)
    await_holdings(before)
    with holdfast.open(configured) as store:
        assert store.recovery.wait(60)
        assert store.session(FINGERPRINT).cover(tokens_for(1)) == 32 * BLOCKS
    assert times >= OPENS // 4


def test_an_interrupted_close_with_many_queued_blocks_loses_none(configured, caplog) -> None:
    rng, times, points = random.Random(17), 0, 24
    store = holdfast.open(configured)
    store.session(FINGERPRINT).save(tokens_for(0, LARGE), blocks_for(0, LARGE))
    lines, seconds = lines_and_seconds(store.close)
    for at in range(1, points + 1):
        with holdfast.open(configured) as store:
            assert store.recovery.wait(60)
            session = store.session(FINGERPRINT)
            for seed in (at, 100 + at):
                session.save(tokens_for(seed, LARGE), blocks_for(seed, LARGE))
            times += run_interrupted(store.close, rng, max(lines, 40), seconds)
        # The block's end has called `close` again, which waits for the rest.
    with holdfast.open(configured) as store:
        assert store.recovery.wait(60)
        session = store.session(FINGERPRINT)
        for at in range(points - 3, points + 1):
            serves_large(session, at, saved=True)
    assert not [record for record in caplog.records if record.exc_info]
    assert times >= 5
