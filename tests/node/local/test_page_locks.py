"""Engines page-lock memory of a real node on grant, and give it back when the node asks."""

import tempfile
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.buffers import SharedMapping
from holdfast.client.engine_locks import EngineLocks
from holdfast.errors import NodeGoneError, RefusedError
from holdfast.testing.store_view import StoreView
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.local.locked_memory import LockedMemory

BLOCKS = 64
NBYTES = 20_000
MIB = 1 << 20


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


def test_memory_that_a_batch_wants_is_locked_and_then_used(saved, locked, registrar, until):
    _, one, ranges = saved()
    device = registrar()
    memory = locked(one.client, device)
    assert not memory.use(ranges)
    memory.want(ranges)
    memory.start()
    until(lambda: memory.use(ranges))
    chunk = memory.chunk_bytes
    chunks = {place // chunk for place, _ in ranges} | {
        (place + nbytes - 1) // chunk for place, nbytes in ranges
    }
    start = one.client.arena.address
    assert device.locked == {start + each * chunk: chunk for each in chunks}
    assert device.threads == {"holdfast-lock"}
    assert memory.locked_bytes == len(chunks) * chunk
    memory.done(ranges)


def test_an_engine_locks_a_warm_node_at_its_start(saved, locked, registrar, until):
    _, one, ranges = saved()
    memory = locked(one.client, registrar())
    assert memory.lock_at_start(30.0) > 0
    assert memory.use(ranges)
    memory.done(ranges)


class LateClient:
    """A client whose node answers the first lock request late, and then recalls what it granted.

    Both answers arrive together, in this order.
    """

    def __init__(self):
        self.welcome = m.Welcome(m.PROTOCOL, "late", b"", MIB, chunk_bytes=MIB, lockable_bytes=MIB)
        with tempfile.TemporaryFile() as file:
            file.truncate(MIB)
            self.arena = SharedMapping(file.fileno(), MIB)
        self.closed = False
        self.sent = []
        self.replies = {}

    def send(self, message):
        self.sent.append(message)
        if message == m.AwaitRecall() and self.sent.count(message) == 1:
            self.replies = {1: m.Locked([0]), len(self.sent): m.Recall([0], 5.0)}
        return len(self.sent)

    def poll(self, request_id):
        return self.replies.pop(request_id, None)

    def forget(self, request_id):
        self.replies.pop(request_id, None)


def test_a_grant_that_arrives_with_its_recall_is_given_back_and_not_locked(
    locked, registrar, until, own_time
):
    client, device = LateClient(), registrar()
    memory = locked(client, device)
    assert memory.lock_at_start(within_s=0.01) == 0
    assert isinstance(client.sent[0], m.Lock)
    memory.start()
    until(lambda: m.Unlock([0]) in client.sent)
    memory.close()
    assert device.calls == 0


@pytest.fixture
def own_time(monkeypatch):
    """Time of `lock_at_start` that passes only while it sleeps."""
    slept_s = [0.0]

    def sleep(seconds):
        slept_s[0] += seconds
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=lambda: slept_s[0], sleep=sleep)
    monkeypatch.setattr("holdfast.wire.local.locked_memory.time", clock)


class ConfusedClient(LateClient):
    """A client whose node grants two chunks, and answers the request for a recall with nonsense.

    A second lock request has no answer yet.
    """

    def __init__(self):
        super().__init__()
        chunk = MIB // 4
        self.welcome = m.Welcome(m.PROTOCOL, "x", b"", MIB, chunk_bytes=chunk, lockable_bytes=MIB)
        self.forgotten = []

    def send(self, message):
        self.sent.append(message)
        if isinstance(message, m.Lock) and self.sent.count(message) == 1:
            self.replies[len(self.sent)] = m.Locked([0, 2])
        if isinstance(message, m.AwaitRecall):
            self.replies[len(self.sent)] = m.Done()
        return len(self.sent)

    def forget(self, request_id):
        self.forgotten.append(self.sent[request_id - 1])


def test_a_thread_that_ends_by_an_error_gives_back_all_that_was_granted(
    locked, registrar, until, caplog, own_time
):
    client, device = ConfusedClient(), registrar()
    memory = locked(client, device)
    assert memory.lock_at_start(within_s=0.05) == MIB // 2
    assert client.sent == [m.Lock(most=32), m.Lock(most=32)]
    memory.start()
    until(lambda: client.forgotten)
    memory.close()
    (unlock,) = [each for each in client.sent if isinstance(each, m.Unlock)]
    assert sorted(unlock.chunks) == [0, 2]
    assert "Recall was expected" in unlock.failure
    assert device.locked == {}
    assert m.Lock(most=32) in client.forgotten, "what it grants goes back, too"
    assert not memory.use([(0, 1)])
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "copied without page-locked memory: Recall was expected" in caplog.text


def test_closing_unlocks_everything_once_no_batch_uses_it(saved, locked, registrar, until):
    _, one, ranges = saved()
    device = registrar()
    memory = locked(one.client, device)
    memory.lock_at_start(30.0)
    memory.start()
    assert memory.use(ranges)
    closing = threading.Thread(target=memory.close)
    closing.start()
    time.sleep(0.3)
    assert device.locked, "a batch still copies"
    assert not memory.use(ranges), "no new batch begins"
    memory.done(ranges)
    closing.join(60)
    assert device.locked == {}


def test_a_lost_node_ends_all_locks(saved, locked, registrar, until):
    node, one, ranges = saved()
    device = registrar()
    memory = locked(one.client, device)
    memory.lock_at_start(30.0)
    memory.start()
    assert device.locked
    node.kill()
    until(lambda: not device.locked)
    assert not memory.use(ranges)


@pytest.mark.parametrize("fails_from", [1, 2, 3])
def test_a_registration_that_fails_leaves_what_is_locked_and_says_why(
    saved, locked, registrar, caplog, until, fails_from
):
    node, one, ranges = saved()
    for more in range(2):  # three chunks in all
        one.save([bytes([n, more]) * 8 for n in range(200)])
    device = registrar(fails_from)
    memory = locked(one.client, device)
    memory.lock_at_start(30.0)
    assert len(device.locked) == fails_from - 1
    assert "Cannot allocate memory" in memory.failure
    assert "ulimit -l" in caplog.text
    memory.want(ranges)
    memory.start()
    time.sleep(0.3)
    assert device.calls == fails_from, "it is not tried again"
    until(lambda: "does not lock memory" in node.said())
    (shown,) = one.status()["page_locks"]["engines"]
    assert (shown["engine"], shown["domain"]) == ("test", "default")
    assert shown["locked_bytes"] == memory.locked_bytes
    assert "Cannot allocate memory" in shown["failure"]


def test_a_client_without_a_namespace_locks_nothing(start_node, locked, registrar):
    node = start_node()
    client = Client(node.address, m.Hello(m.PROTOCOL, "tool"), 60)
    memory = locked(client, registrar())
    assert memory.lock_at_start() == 0
    assert not memory.use([(0, 1)])
    client.close()


def two_domains(node_here, engine, **options):
    """Return a node, and an engine in each of two domains; the first one's blocks fill memory."""
    node = node_here(default=0, other=0, **options)
    one, two = engine(node.address), engine(node.address, domain="other")
    return node, one, two


def fill(one, names, count=400):
    """Save blocks until memory is full; return the ranges of those that are held."""
    keys = [key for at in range(count // 40) for key in names(f"fill/{at}", 40)]
    for at in range(0, count, 40):
        one.save(keys[at : at + 40])
    found = []
    for at in range(0, count, 40):
        fetched = one.call(m.Fetch(b"".join(keys[at : at + 40]), 10.0))
        found += fetched.places
        one.call(m.Release(fetched.lease))
    return ranges_of(found)


def grow(two, names, until, blocks=40):
    """Save a context of the second domain until memory has moved to it."""
    keys = names("grow", blocks)

    def grown():
        two.save(keys)
        return two.cover(keys) == blocks

    until(grown)


def test_memory_moves_to_another_domain_when_the_engine_has_unlocked_it(
    node_here, engine, names, locked, registrar, until
):
    node, one, two = two_domains(node_here, engine)
    ranges = fill(one, names)
    device = registrar()
    memory = locked(one.client, device)
    assert memory.lock_at_start(30.0) > 2 * MIB
    memory.start()
    before = len(device.locked)
    assert memory.use(ranges[:1])
    memory.done(ranges[:1])
    grow(two, names, until)
    assert len(device.locked) < before
    assert StoreView(node.store).recalls("returned") > 0
    assert not one.client.closed
    # A chunk is unlocked a bit before the node is told.
    until(lambda: node.host("default").lock_usage().locked == len(device.locked))


def test_a_batch_in_flight_keeps_its_memory_locked_when_it_is_recalled(
    node_here, engine, names, locked, registrar, until
):
    _, one, two = two_domains(node_here, engine)
    ranges = fill(one, names)
    device = registrar()
    memory = locked(one.client, device)
    memory.lock_at_start(30.0)
    memory.start()
    in_use = [each for each in ranges if memory.use([each])]
    locks = len(device.locked)
    keys = names("grow", 40)

    def begins_no_new_batch():
        two.save(keys)
        if memory.use(in_use):
            memory.done(in_use)
            return False
        return True

    until(begins_no_new_batch)
    two.save(keys)
    assert len(device.locked) == locks
    for each in in_use:
        memory.done([each])
    grow(two, names, until)
    assert len(device.locked) < locks


def test_an_engine_that_does_not_answer_a_recall_loses_its_session_then_its_locks(
    node_here, engine, names, until, monkeypatch
):
    monkeypatch.setattr("holdfast.node.local.page_locks.LOCK_RECALL_S", 0.2)
    monkeypatch.setattr("holdfast.node.local.sessions.RECLAIM_S", 5.0)
    monkeypatch.setattr("holdfast.node.local.sessions._GONE_WITHIN_S", 0.1)
    node, one, two = two_domains(node_here, engine)
    fill(one, names)
    granted = one.call(m.Lock(most=64)).chunks
    one.client.send(m.AwaitRecall())
    reserved = one.reserve(names("under way", 1))
    two.save(names("grow", 40))
    assert "did not unlock" in until(lambda: why_ended(one))
    with pytest.raises(NodeGoneError, match=r"did not unlock .* within 0\.2 s"):
        one.call(m.Commit(reserved.ticket))
    assert node.host("default").lock_usage().locked == len(granted), "its GPU may still copy"
    assert two.cover(names("grow", 40)) < 40
    until(lambda: node.host("default").lock_usage().locked == 0)
    grow(two, names, until)
    assert StoreView(node.store).recalls("missed") == 1


def why_ended(one):
    """Return why the node has ended this engine's session; empty while it has not."""
    try:
        one.call(m.Cover(b""))
    except NodeGoneError as error:
        return str(error)
    return ""


def test_a_peer_that_misses_two_recalls_gets_no_more_locks(
    node_here, engine, names, until, monkeypatch
):
    monkeypatch.setattr("holdfast.node.local.page_locks.LOCK_RECALL_S", 0.1)
    monkeypatch.setattr("holdfast.node.local.sessions.RECLAIM_S", 0.3)
    monkeypatch.setattr("holdfast.node.local.sessions._GONE_WITHIN_S", 0.1)
    node, one, two = two_domains(node_here, engine)
    for turn in range(2):
        fill(one, names)
        assert one.call(m.Lock(most=64)).chunks
        one.client.send(m.AwaitRecall())
        two.save(names(f"grow/{turn}", 40))
        until(partial(why_ended, one))
        until(lambda: not node.host("default").has_locks)
        one = engine(node.address)
    fill(one, names)
    assert one.call(m.Lock(most=64)).chunks == []
    assert StoreView(node.store).recalls("missed") == 2


def test_a_domain_locks_neither_what_others_reserved_nor_the_last_two_runs(
    node_here, engine, names
):
    node = node_here(host_bytes=16 * MIB, other=8 * MIB)
    one = engine(node.address)
    fill(one, names, 600)
    chunk = one.client.welcome.chunk_bytes
    assert one.client.welcome.lockable_bytes == 6 * MIB, "runs of one chunk, 1 MiB"
    assert len(one.call(m.Lock(most=64)).chunks) * chunk == 6 * MIB


def test_a_limit_of_locked_memory_holds_and_zero_forbids_it(node_here, engine, names):
    node = node_here(host_bytes=16 * MIB, lock_bytes=3 * MIB)
    one = engine(node.address)
    fill(one, names, 600)
    assert len(one.call(m.Lock(most=64)).chunks) == 3


def test_a_node_that_forbids_locks_says_which_option_does(
    node_here, engine, locked, registrar, caplog
):
    node = node_here(lock_bytes=0)
    one = engine(node.address)
    memory = locked(one.client, registrar())
    assert memory.lock_at_start() == 0
    assert "tiers.0.lock" in caplog.text
    assert one.call(m.Lock(most=64)).chunks == []


def test_an_engine_of_its_own_domain_alone_locks_all_of_it(node_here, engine, names):
    node = node_here(host_bytes=16 * MIB)
    one = engine(node.address)
    fill(one, names, 800)
    assert len(one.call(m.Lock(most=64)).chunks) == 16


def test_locks_of_a_session_do_not_outlive_it_for_the_next_one(
    node_here, engine, names, until, monkeypatch
):
    monkeypatch.setattr("holdfast.node.local.sessions.RECLAIM_S", 0.3)
    monkeypatch.setattr("holdfast.node.local.sessions._GONE_WITHIN_S", 0.1)
    node = node_here(host_bytes=16 * MIB)
    one = engine(node.address)
    fill(one, names, 400)
    granted = one.call(m.Lock(most=64)).chunks
    again = engine(node.address)
    again.call(m.Unlock(granted))
    assert node.host("default").lock_usage().locked == len(granted), "another session's locks"
    one.close()
    until(lambda: node.host("default").lock_usage().locked == 0)
    again.client.send(m.AwaitRecall())
    with pytest.raises(RefusedError, match="one recall at a time"):
        again.call(m.AwaitRecall())


def test_a_device_that_cannot_unlock_keeps_its_memory_and_loses_its_session(
    impatient_node, engine, names, registrar, until, caplog
):
    node, one, two = two_domains(impatient_node, engine)
    fill(one, names)
    device = registrar()
    memory = LockedMemory(one.client, device)
    memory.lock_at_start(30.0)
    before = dict(device.locked)

    def fail(address):
        raise OSError(5, "device lost")

    device.unregister = fail
    memory.start()
    two.save(names("grow", 40))
    assert "bytes stay page-locked: the device cannot unlock" in until(lambda: why_ended(one))
    assert "the session with the node ends, and begins again" in caplog.text
    stuck = [each for each in caplog.records if "memory stays page-locked" in each.message]
    assert len(stuck) == 1, "one line for all chunks"
    assert device.locked == before
    view = one.client.arena.view
    one.client.arena = None
    memory.close()
    assert view[0] in range(256), "what the device may still use stays mapped"
    until(lambda: not node.host("default").has_locks)


def test_a_connection_has_its_own_locked_memory_and_a_device_without_locks_none(
    node_here, engine, registrar
):
    node = node_here()
    one, again = engine(node.address), engine(node.address)
    locks = EngineLocks(registrar())
    first = locks.of(one.client)
    assert locks.of(one.client) is first
    assert locks.of(again.client) is not first
    locks.close()
    assert EngineLocks(None).of(one.client) is None


@pytest.mark.parametrize(("lock_bytes", "locks"), [(None, False), (0, False), (2 * MIB, True)])
def test_a_device_that_does_not_lock_by_default_locks_where_the_node_has_a_size_for_it(
    node_here, engine, registrar, lock_bytes, locks
):
    one = engine(node_here(host_bytes=16 * MIB, lock_bytes=lock_bytes).address)
    assert one.client.welcome.lock_requested == locks
    by_default = EngineLocks(registrar(), by_default=True)
    asked = EngineLocks(registrar(), by_default=False)
    assert by_default.of(one.client) is not None
    assert (asked.of(one.client) is not None) == locks
    for each in (by_default, asked):
        each.close()


def test_an_engine_that_starts_is_asked_for_memory_when_it_waits_for_recalls(
    impatient_node, engine, names, until
):
    node, one, two = two_domains(impatient_node, engine)
    fill(one, names)
    assert one.call(m.Lock(most=64)).chunks
    two.save(names("grow", 40))
    until(lambda: node.host("default").recalled_chunks)
    time.sleep(1.0)
    assert not why_ended(one), "it loads its model, and its deadline is longer"
    recall = one.call(m.AwaitRecall())
    assert recall.chunks
    assert "did not unlock" in until(lambda: why_ended(one))
