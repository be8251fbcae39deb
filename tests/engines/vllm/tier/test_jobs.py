"""Jobs that are closed or whose request ends while they are under way: nothing is written late."""

import hashlib
import threading
import time

import numpy as np
import pytest

pytest.importorskip("vllm")

import holdfast
from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import OpaqueLayout
from holdfast.engines.vllm.tier.jobs import LOAD_THREADS, SAVE_THREADS, PrefixRun, TransferJobs
from holdfast.errors import Outcome
from holdfast.named_blocks import memory_of

pytestmark = pytest.mark.vllm

WITHIN_S = 60.0
ROW = 64 * 1024
MEANING = Meaning(
    model="m",
    positions="none",
    adapter="none",
    kv_quantisation="none",
    kv_scales="none",
    naming="engine sha256",
    block_tokens=16,
    kv_group=KvGroup.all_layers(2),
)
LAYOUT = OpaqueLayout(
    dtype="float16",
    block_tokens=16,
    layers=2,
    nbytes=ROW,
    arrangement="rank 0 of 1",
    engine="engine",
    engine_version="1",
)
LOADED, SAVED = 8, 3
"""Blocks that are loaded, and blocks that are saved beside them."""


class GatedSession:
    """Named blocks of a store, whose calls begin only when the gate is open."""

    def __init__(self, session):
        self.raw_bytes = session.raw_bytes
        self.gate = threading.Event()
        self._session = session
        self._begun = threading.Semaphore(0)

    def await_begun(self, calls):
        """Wait until so many more calls have come to the gate."""
        for _ in range(calls):
            assert self._begun.acquire(timeout=WITHIN_S)

    def get(self, names, memory, deadline_s):
        self._begun.release()
        assert self.gate.wait(WITHIN_S)
        return self._session.get(names, memory, deadline_s)

    def put(self, names, memory, after):
        self._begun.release()
        assert self.gate.wait(WITHIN_S)
        return self._session.put(names, memory, after)

    def exists(self, names):
        return self._session.exists(names, WITHIN_S)


def rows_of(count, seed):
    return np.random.default_rng(seed).integers(1, 256, (count, ROW), np.uint8)


def run_of(rows, what):
    """Return the blocks in an array of rows, each with a name of its own."""
    names = [hashlib.sha256(f"{what} {number}".encode()).digest() for number in range(len(rows))]
    return PrefixRun(names, [memory_of(row) for row in rows])


@pytest.fixture
def held():
    """The rows that the store holds under the names of `run_of(rows, "held")`."""
    return rows_of(LOADED, seed=1)


@pytest.fixture
def session(held, monkeypatch):
    monkeypatch.setattr("holdfast.engines.vllm.tier.jobs.PART_BYTES", ROW)  # a block is a part
    with holdfast.open(host="16 MiB") as store:
        session = GatedSession(store.named_session(Fingerprint(MEANING, LAYOUT)))
        session.gate.set()
        jobs = TransferJobs(session, WITHIN_S)
        jobs.save(0, [run_of(held, "held")])
        jobs.drain()
        assert [len(job.transferred) for job in jobs.ended()] == [LOADED]
        jobs.close()
        session.gate.clear()
        session.await_begun(LOADED)
        yield session
        session.gate.set()


class ClosingJobs:
    """Two loads and a save, closed while some of their parts wait at the gate."""

    def __init__(self, session):
        self.session = session
        self.memory, self.saved = np.zeros((LOADED, ROW), np.uint8), rows_of(SAVED, seed=2)
        self.jobs = TransferJobs(session, WITHIN_S)
        self.ended = {}
        run = run_of(self.memory, "held")
        for number, part in enumerate((slice(0, 6), slice(6, LOADED))):
            self.jobs.load(number, PrefixRun(run.names[part], run.memory[part]))
        self.jobs.save(2, [run_of(self.saved, "saved")])
        session.await_begun(LOAD_THREADS + SAVE_THREADS)
        self._closer = threading.Thread(target=self.jobs.close)
        self._closer.start()

    def await_ended(self, number):
        end_s = time.monotonic() + WITHIN_S
        while number not in self.ended:
            assert time.monotonic() < end_s, "the job does not end"
            for job in self.jobs.ended():
                assert job.number not in self.ended, "a job ends once"
                self.ended[job.number] = job

    def await_closed(self):
        # These end only when the pools of threads take no more work: their threads are all waiting.
        self.jobs.load(3, run_of(np.zeros((1, ROW), np.uint8), "held"))
        self.jobs.save(4, [run_of(rows_of(1, seed=3), "late")])
        for number in (3, 4):
            self.await_ended(number)
        self.session.gate.set()
        self._closer.join(WITHIN_S)
        assert not self._closer.is_alive()
        for number in range(3):
            self.await_ended(number)


@pytest.fixture
def closing(session):
    closing = ClosingJobs(session)
    yield closing
    session.gate.set()
    closing.jobs.close()


def test_a_job_that_has_not_begun_is_cancelled_and_ends_as_failed(closing):
    closing.await_ended(1)  # before those that have begun, which cannot go on
    assert closing.ended.keys() == {1}
    assert len(closing.ended[1].failed) == LOADED - 6
    assert not closing.memory.any()


def test_after_closing_no_row_is_written_and_only_what_had_begun_is(closing, held):
    closing.await_closed()
    after = closing.memory.copy()
    first = closing.ended[0]
    assert (len(first.transferred), len(first.failed)) == (LOAD_THREADS, 6 - LOAD_THREADS)
    assert (after[:LOAD_THREADS] == held[:LOAD_THREADS]).all()
    assert not after[LOAD_THREADS:].any()
    names = run_of(closing.saved, "saved").names
    assert closing.ended[2].transferred == names[:SAVE_THREADS]
    assert closing.ended[2].failed == names[SAVE_THREADS:]
    outcomes = [Outcome.OK] * SAVE_THREADS + [Outcome.MISS] * (SAVED - SAVE_THREADS)
    assert closing.session.exists(names) == outcomes


def test_closed_jobs_leave_nothing_to_wait_for_and_later_jobs_work(closing, held):
    closing.await_closed()
    closing.jobs.drain()
    closing.jobs.load(5, run_of(closing.memory, "held"))
    closing.await_ended(5)
    assert len(closing.ended[5].failed) == LOADED
    closing.jobs.drain()
    assert not [each for each in threading.enumerate() if "holdfast-tier" in each.name]
    later, rows = TransferJobs(closing.session, WITHIN_S), np.zeros((LOADED, ROW), np.uint8)
    later.load(0, run_of(rows, "held"))
    later.drain()
    assert [len(job.transferred) for job in later.ended()] == [LOADED]
    assert (rows == held).all()
    later.close()
