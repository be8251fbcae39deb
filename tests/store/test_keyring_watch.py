"""A shared ring whose file system hangs: nobody waits for it, and nothing is served for long."""

import threading
import time

import pytest

from holdfast.clock import ManualClock
from holdfast.keys import keyring_file
from holdfast.keys.keyring import KeyRing
from holdfast.keys.keyring_watch import KeyRingWatch
from holdfast.limits import RING_STALE_S
from holdfast.testing.memory import MemoryTier

MIB = 1 << 20
SECRET = b"s" * 32
BLOCKS = 6


class Hanging:
    """A file system that stands still for everybody but the thread that made this."""

    def __init__(self, monkeypatch):
        self.reached, self.back = threading.Event(), threading.Event()
        self._stamp, self._maker = keyring_file.stamp, threading.current_thread()
        monkeypatch.setattr(keyring_file, "stamp", self.stamp)

    def stamp(self, path):
        if threading.current_thread() is not self._maker:
            self.reached.set()
            assert self.back.wait(60)
        return self._stamp(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ring.json"


@pytest.fixture
def hanging(monkeypatch):
    made = []

    def begin():
        made.append(Hanging(monkeypatch))
        return made[-1]

    yield begin
    for each in made:
        each.back.set()


def ring_at(path):
    ring = KeyRing(path)
    ring.enrol("default", SECRET)
    return ring


def in_time(work):
    """Do it in a thread that may hang; whether it did not."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def until_back(store):
    while store.options.ring.suspended or store.shared_ring.lost:
        store.shared_ring.follow()


def test_a_key_ring_read_that_hangs_ends_serving_and_leases(harness, path, hanging):
    one = harness(tier=MemoryTier(32 * MIB), ring=ring_at(path))
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.flush()
    lease = one.store.fetch(one.namespace, chain.keys, 5.0).lease
    hung = hanging()
    assert in_time(one.store._housekeep_once)
    assert hung.reached.wait(60)
    ring_at(path).erase("default")  # by a node that still reaches it
    one.clock.advance(RING_STALE_S + 1)
    assert in_time(one.store._housekeep_once)
    assert not one.store.release(lease)
    assert one.read(chain) == 0
    assert one.save(one.chain(2, BLOCKS)) == 0
    hung.back.set()
    assert in_time(lambda: until_back(one.store))
    assert one.read(chain) == 0
    assert one.save(one.chain(2, BLOCKS)) == BLOCKS


def test_a_key_ring_change_that_hangs_does_not_delay_a_suspension(path, hanging):
    ring = ring_at(path)
    hung = hanging()
    change = threading.Thread(target=ring.rotate, args=("default",), daemon=True)
    change.start()
    assert hung.reached.wait(60)
    assert in_time(ring.suspend)
    hung.back.set()
    change.join(60)
    assert ring.enrolled()
    assert all(ring.current(domain) is None for domain in ring.enrolled()), "it is read once more"
    ring.look()
    assert [ring.current(domain).epoch for domain in ring.enrolled()] == [2]


def test_a_successful_key_ring_read_counts_from_its_start(path, hanging):
    clock = ManualClock()
    watch = KeyRingWatch(ring_at(path), clock)
    hung = hanging()
    clock.advance(5)
    assert in_time(watch.look_briefly)
    clock.advance(100)
    hung.back.set()
    assert in_time(watch.look_briefly)
    seen, until = set(), time.monotonic() + 60
    while watch.read_at != 105:
        seen.add(watch.read_at)
        assert time.monotonic() < until
        watch.look_briefly()
    assert seen <= {0, 5}
    assert watch.why == ""


def test_the_watch_reports_why_the_key_ring_cannot_be_read(path, monkeypatch):
    monkeypatch.setattr("holdfast.keys.keyring_watch.LOOK_WAIT_S", 60.0)
    clock = ManualClock()
    watch = KeyRingWatch(ring_at(path), clock)
    path.rename(path.with_name("away"))
    clock.advance(5)
    watch.look_briefly()
    assert watch.read_at == 0
    assert "No such file" in watch.why


def test_a_read_that_fails_without_a_word_is_no_successful_read(path, monkeypatch):
    monkeypatch.setattr("holdfast.keys.keyring_watch.LOOK_WAIT_S", 60.0)
    clock, ring = ManualClock(), ring_at(path)
    watch = KeyRingWatch(ring, clock)

    def fails():
        raise TimeoutError

    monkeypatch.setattr(ring, "look", fails)
    clock.advance(5)
    watch.look_briefly()
    assert watch.read_at == 0
    assert watch.why == "TimeoutError()"


def test_at_most_one_key_ring_read_is_in_progress(path, hanging):
    watch = KeyRingWatch(ring_at(path), ManualClock())
    hung = hanging()
    assert all(in_time(watch.look_briefly) for _ in range(3))
    assert sum(thread.name == "holdfast-keyring" for thread in threading.enumerate()) == 1
    hung.back.set()


def test_a_key_ring_read_whose_thread_cannot_start_is_reported(path, monkeypatch):
    monkeypatch.setattr("holdfast.keys.keyring_watch.LOOK_WAIT_S", 60.0)
    watch = KeyRingWatch(ring_at(path), ManualClock())
    start = threading.Thread.start

    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    watch.look_briefly()
    assert watch.why == "can't start new thread; raise the limit of threads"
    monkeypatch.setattr(threading.Thread, "start", start)
    watch.look_briefly()
    assert watch.why == ""
