"""Engines page-lock memory of a real node on grant, and give it back when the node asks."""

import threading
import time

import pytest

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.wire.local import messages as m
from holdfast.wire.local.locked_memory import LockedMemory

BLOCKS = 64
NBYTES = 20_000


class Registrar:
    """Notes what is locked, as a device would; fails from call `fails_from` on."""

    def __init__(self, fails_from=1 << 30):
        self.fails_from = fails_from
        self.calls = 0
        self.locked = {}
        self.threads = set()

    def register(self, address, nbytes):
        self.calls += 1
        if self.calls >= self.fails_from:
            raise OSError(12, "Cannot allocate memory")
        assert address not in self.locked
        self.locked[address] = nbytes
        self.threads.add(threading.current_thread().name)

    def unregister(self, address):
        del self.locked[address]


def until(condition, within_s=60):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ranges_of(places):
    return [(place, HEADER_BYTES + NBYTES) for place in places if place >= 0]


@pytest.fixture
def saved(start_node, engine, names):
    """Return a node with an engine that has saved blocks, and where they are."""

    def start(**settings):
        node = start_node(**settings)
        one = engine(node.address)
        keys = names("context", BLOCKS)
        assert one.save(keys) == BLOCKS
        fetched = one.call(m.Fetch(b"".join(keys), 10.0))
        one.call(m.Release(fetched.lease))
        return node, one, ranges_of(fetched.places)

    return start


@pytest.fixture
def locked():
    """Call with a client and a registrar to get locked memory; all are closed with the test."""
    made = []

    def lock(client, registrar):
        made.append(LockedMemory(client, registrar))
        return made[-1]

    yield lock
    for memory in made:
        memory.close()


def test_memory_that_a_batch_wants_is_locked_and_then_used(saved, locked):
    _, one, ranges = saved()
    registrar = Registrar()
    memory = locked(one.client, registrar)
    assert not memory.use(ranges)
    memory.want(ranges)
    memory.start()
    until(lambda: memory.use(ranges))
    chunk = memory.chunk_bytes
    chunks = {place // chunk for place, _ in ranges} | {
        (place + nbytes - 1) // chunk for place, nbytes in ranges
    }
    start = one.client.arena.address
    assert registrar.locked == {start + each * chunk: chunk for each in chunks}
    assert registrar.threads == {"holdfast-lock"}
    assert memory.locked_bytes == len(chunks) * chunk
    memory.done(ranges)


def test_an_engine_locks_a_warm_node_at_its_start(saved, locked):
    _, one, ranges = saved()
    memory = locked(one.client, Registrar())
    assert memory.lock_at_start(30.0) > 0
    assert memory.use(ranges)
    memory.done(ranges)


def test_closing_unlocks_everything_once_no_batch_uses_it(saved, locked):
    _, one, ranges = saved()
    registrar = Registrar()
    memory = locked(one.client, registrar)
    memory.lock_at_start(30.0)
    memory.start()
    assert memory.use(ranges)
    closing = threading.Thread(target=memory.close)
    closing.start()
    time.sleep(0.3)
    assert registrar.locked, "a batch still copies"
    assert not memory.use(ranges), "no new batch begins"
    memory.done(ranges)
    closing.join(30)
    assert registrar.locked == {}


def test_a_lost_node_ends_all_locks(saved, locked):
    node, one, ranges = saved()
    registrar = Registrar()
    memory = locked(one.client, registrar)
    memory.lock_at_start(30.0)
    memory.start()
    assert registrar.locked
    node.kill()
    until(lambda: not registrar.locked)
    assert not memory.use(ranges)


@pytest.mark.parametrize("fails_from", [1, 2])
def test_a_registration_that_fails_leaves_what_is_locked_and_says_why(
    saved, locked, caplog, fails_from
):
    node, one, ranges = saved()
    one.save([bytes([n]) * 16 for n in range(255)])
    registrar = Registrar(fails_from)
    memory = locked(one.client, registrar)
    memory.lock_at_start(30.0)
    assert len(registrar.locked) == fails_from - 1
    assert "Cannot allocate memory" in memory.failure
    assert "ulimit -l" in caplog.text
    memory.want(ranges)
    memory.start()
    time.sleep(0.3)
    assert registrar.calls == fails_from, "it is not tried again"
    assert "does not lock memory" in node.said()


def test_a_client_without_a_namespace_locks_nothing(start_node, locked):
    from holdfast.wire.local.client import Client

    node = start_node()
    client = Client(node.address, m.Hello(m.PROTOCOL, "tool"), 10)
    memory = locked(client, Registrar())
    assert memory.lock_at_start() == 0
    assert not memory.use([(0, 1)])
    client.close()
