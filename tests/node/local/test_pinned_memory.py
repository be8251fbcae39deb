"""io_uring pins memory as a GPU's driver does: no byte is lost when memory moves or sides die."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from holdfast.errors import NodeGoneError
from holdfast.testing.locking_engine import LockingEngine
from holdfast.testing.payloads import key_of
from holdfast.testing.pinned_device import PinnedDevice
from holdfast.testing.store_view import StoreView
from holdfast.wire.local import messages as m

MIB = 1 << 20
NBYTES = 20_000
CONTEXT = 20
WORK_S = 5.0


def io_uring_works():
    try:
        PinnedDevice().close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")

CHILD = """
import sys, time
from holdfast.testing.locking_engine import LockingEngine
from holdfast.testing.payloads import key_of

address, domain, where = sys.argv[1:]
engine = LockingEngine(address, domain, 20_000)
register = engine.device.register
def slow(*range):
    register(*range)
    print("registering", flush=True)
    time.sleep(3600)
if where == "registering":
    engine.device.register = slow
keys = [key_of(n, 7) for n in range(66)]  # the last run has free slots
engine.save(keys)
engine.memory.lock_at_start(30.0)
engine.memory.start()
engine.load(keys)
assert engine.counts["locked"], engine.counts
if where == "saving":
    save = engine.device.save
    def partly(address, payload):
        save(address, payload[: len(payload) // 2])
        print("saving", flush=True)
        time.sleep(3600)
    engine.device.save = partly
    engine.save([key_of(n, 8) for n in range(20)])
if where == "loading":
    engine.device.load = lambda *range: (print("loading", flush=True), time.sleep(3600))
    engine.load(keys)
print("locked", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def locking():
    """Call with an address and a domain to connect an engine whose device pins memory."""
    with contextlib.ExitStack() as stack:

        def connect(address, domain="default"):
            made = LockingEngine(address, domain, NBYTES)
            stack.callback(made.close)
            return made

        yield connect


@pytest.fixture
def child(tmp_path):
    """Call with an address, a domain and a point to start an engine that stops there."""
    with contextlib.ExitStack() as stack:

        def start(address, where, domain="default"):
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, address, domain, where], stdout=subprocess.PIPE
            )
            stack.callback(process.stdout.close)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout.readline().strip().decode() == where
            return process

        yield start


def contexts(name, count):
    return [[key_of(n, 1000 * name + at) for n in range(CONTEXT)] for at in range(count)]


def work(engine, reader, keys, failures, is_enough):
    """Save and load contexts of one domain, more than memory holds, until the time is over.

    A busy machine gets more time, until it `is_enough`. `reader` has no locks: it reads the arena,
    where the device could read pages of its own.
    """
    order, begun_s = random.Random(keys[0][0]), time.monotonic()
    try:
        while (took_s := time.monotonic() - begun_s) < WORK_S or (took_s < 60 and not is_enough()):
            engine.load(order.choice(keys))
            engine.save(order.choice(keys))
            reader.load(order.choice(keys))
    except Exception as error:
        failures.append(error)
        raise


def test_no_byte_is_wrong_while_two_domains_take_memory_from_each_other(node_here, locking):
    node = node_here(other=MIB)
    engines = [locking(node.address), locking(node.address, "other")]
    readers = [locking(node.address), locking(node.address, "other")]
    failures, threads, view = [], [], StoreView(node.store)

    def is_enough():
        return view.recalls("returned") and all(each.counts["locked"] for each in engines)

    for number, each in enumerate(engines):
        each.memory.start()
        args = each, readers[number], contexts(number, 12), failures, is_enough
        threads.append(threading.Thread(target=work, args=args))
        threads[-1].start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        check_budget(node)
    assert failures == []
    assert [each.counts["wrong"] for each in (*engines, *readers)] == [0] * 4
    for each in engines:
        assert each.counts["locked"] > 0, each.counts
    assert view.recalls("returned") > 0
    assert view.recalls("missed") == 0


def check_budget(node):
    """Used, kept and prefaulted chunks of all arenas never exceed the budget."""
    resident = node.store.status().memory.resident_bytes
    assert resident <= node.store.host_bytes + MIB, "one chunk may be on its way"


def test_blocks_saved_through_pinned_memory_survive_that_their_runs_close_and_open(
    node_here, locking
):
    node = node_here()
    one, reader = locking(node.address), locking(node.address)
    keys = contexts(1, 14)
    for context in keys[:4]:
        one.save(context)
    assert one.memory.lock_at_start(30.0) > 0
    one.memory.start()
    for turn in range(4):
        node.store.drop("*")  # closes every run: its chunks are kept, and serve the next ones
        for context in keys[3 * turn : 3 * turn + 3]:
            assert one.save(context) == CONTEXT
            assert one.load(context) == CONTEXT
            assert reader.load(context) == CONTEXT, "through the arena, not the pinned pages"
    assert (one.counts["wrong"], reader.counts["wrong"]) == (0, 0)
    assert one.counts["locked"] > 3 * CONTEXT, one.counts


@pytest.mark.parametrize("collapse", [25, 9_999], ids=["huge", "small"])
def test_memory_is_locked_on_huge_pages_and_where_the_kernel_gives_none(
    node_here, locking, monkeypatch, collapse
):
    monkeypatch.setattr("holdfast.buffers._MADV_COLLAPSE", collapse)
    node = node_here(host_bytes=64 * MIB)  # chunks of 4 MiB
    one = locking(node.address)
    keys = contexts(1, 4)
    for context in keys:
        one.save(context)
    assert one.memory.lock_at_start(30.0) == 4 * MIB
    for context in keys:
        assert one.load(context) == CONTEXT
    assert one.counts["wrong"] == 0
    assert one.counts["locked"] == 4 * CONTEXT


def test_a_missed_recall_ends_the_session_and_what_its_device_copies_reaches_no_other_domain(
    node_here, locking, until, monkeypatch
):
    monkeypatch.setattr("holdfast.node.local.page_locks.LOCK_RECALL_S", 0.2)
    monkeypatch.setattr("holdfast.node.local.sessions.RECLAIM_S", 0.5)
    monkeypatch.setattr("holdfast.node.local.sessions._GONE_WITHIN_S", 0.1)
    node = node_here(default=0, other=0)
    one, two = locking(node.address), locking(node.address, "other")
    keys = contexts(1, 12)
    for context in keys:
        one.save(context)
    one.memory.lock_at_start(30.0)
    one.client.send(m.AwaitRecall())  # its thread is not started, so it answers no recall
    address = next(iter(one.device._pinned))
    others = contexts(2, 4)
    until(lambda: two.save(others[0]) == 0 or two.load(others[0]) == CONTEXT)
    until(lambda: not node.host("default").has_locks)
    for context in others:
        until(lambda context=context: two.save(context) or two.load(context) == CONTEXT)
    one.device.save(address, b"late" * 1000)
    for context in others:
        assert two.load(context) == CONTEXT
    assert two.counts["wrong"] == 0
    with pytest.raises(NodeGoneError, match="did not unlock"):
        one.load(keys[0])


@pytest.mark.parametrize("where", ["locked", "registering", "saving", "loading"])
def test_memory_of_a_killed_engine_is_free_as_soon_as_its_process_is_gone(
    node_here, child, locking, until, where
):
    node = node_here(default=0, other=0)
    process = child(node.address, where)
    assert node.host("default").has_locks
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not node.host("default").has_locks, 60)
    two = locking(node.address, "other")
    for context in contexts(2, 6):
        until(lambda context=context: two.save(context) or two.load(context) == CONTEXT)
    assert two.counts["wrong"] == 0


def test_an_engine_survives_a_killed_node_and_locks_the_memory_of_the_next_one(
    start_node, locking, tmp_path
):
    tiers = [{"kind": "host", "capacity": 16 * MIB, "lock": 4 * MIB}]
    node = start_node(tiers=tiers)
    one = locking(node.address)
    keys = contexts(1, 6)
    for context in keys:
        one.save(context)
    one.memory.lock_at_start(30.0)
    one.memory.start()
    assert one.load(keys[0]) == CONTEXT
    pinned = one.device.pinned_bytes
    assert pinned > 0
    node.kill()
    with pytest.raises(NodeGoneError):
        one.load(keys[1])
    node.start()
    end = time.monotonic() + 60
    while one.device.pinned_bytes:
        assert time.monotonic() < end, "the lost node's memory stays pinned"
        time.sleep(0.02)
    assert not one.memory.use([(0, 1)]), "a grant of the lost node"
    again = locking(node.address)
    for context in keys:
        assert again.save(context) == CONTEXT
    again.memory.lock_at_start(30.0)
    for context in keys:
        assert again.load(context) == CONTEXT
    assert again.counts["wrong"] == 0
    assert again.counts["locked"] > 0


def test_a_forked_child_of_an_engine_neither_sees_nor_keeps_its_memory(node_here, locking, until):
    node = node_here(default=0, other=0)
    one, two = locking(node.address), locking(node.address, "other")
    keys = contexts(1, 12)
    for context in keys:
        one.save(context)
    one.memory.lock_at_start(30.0)
    one.memory.start()
    held = sum(one.load(context) for context in keys)
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        usable = one.memory.use([(0, 1)])
        os.write(told, b"y" if usable else b"n")
        del one.client.arena, one._arena
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.read(ready, 0)
        view = two.client.arena.view
        view[0]  # not in this process
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"n"
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV
    finally:
        os.close(ready)
        os.close(told)
    assert sum(one.load(context) for context in keys) == held
    for context in contexts(2, 4):
        until(lambda context=context: two.save(context) or two.load(context) == CONTEXT)
    assert (one.counts["wrong"], two.counts["wrong"]) == (0, 0)
