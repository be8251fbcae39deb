"""A wait for a free lane neither kills Mooncake's client nor counts as a failure of the store."""

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from socket import create_server

import pytest
from msgspec.msgpack import encode

from holdfast.byte_size import Size
from holdfast.errors import Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.tiers import child_process
from holdfast.tiers.mooncake import tier as module
from holdfast.tiers.mooncake.client import ClientRequest
from holdfast.tiers.mooncake.kind import MooncakeOptions
from holdfast.tiers.mooncake.tier import LANES, MooncakeTier
from holdfast.wire.remote.stream import Deadline

SLOW_STORE = """
import os, time
def wait_if_held():
    while os.path.exists({hold!r}): time.sleep(0.01)
class MooncakeDistributedStore:
    def setup(self, *settings): time.sleep({starts_s}); return 0
    def register_buffer(self, *memory): return 0
    def batch_get_into(self, keys, addresses, sizes):
        wait_if_held(); time.sleep({takes_s})
        if os.path.exists({fail!r}): raise RuntimeError("a transfer failed")
        return list(sizes)
    def batch_is_exist(self, keys):
        if keys == ["slow"]: wait_if_held()
        return [1] * len(keys)
"""
BLOCKS = ChainedBlocks(4_000)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return a function that opens a tier over a fake Mooncake with the given delays.

    While there is a file `hold` in `tmp_path`, it answers no read, and no lookup of "slow"; while
    there is a file `fail`, its reads raise an error.
    """
    monkeypatch.setattr(module, "find_spec", lambda _: True)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    opened = []
    with create_server(("127.0.0.1", 0)) as master:

        def start(takes_s, starts_s=0.0, deadline_s=2.0):
            (tmp_path / "mooncake").mkdir()
            (tmp_path / "mooncake" / "__init__.py").touch()
            text = SLOW_STORE.format(
                takes_s=takes_s,
                starts_s=starts_s,
                hold=str(tmp_path / "hold"),
                fail=str(tmp_path / "fail"),
            )
            (tmp_path / "mooncake" / "store.py").write_text(text)
            address = f"tcp://127.0.0.1:{master.getsockname()[1]}"
            options = MooncakeOptions(master=address, lane=Size(1 << 20), deadline_s=deadline_s)
            opened.append(MooncakeTier(options))
            return opened[-1]

        yield start
        for tier in opened:
            tier.close()


def wait_until_started(tier):
    end_s = time.monotonic() + 60
    while not tier.held(BLOCKS.namespace, [b"k" * 16], 0):
        assert time.monotonic() < end_s


def read_in_parallel(tier, number):
    """Read a block in `number` threads; return the list of outcomes, which fills, and threads."""
    ended = []

    def read():
        ended.extend(tier.read(BLOCKS.gets([0])))

    threads = [threading.Thread(target=read) for _ in range(number)]
    for thread in threads:
        thread.start()
    return ended, threads


def state(tier):
    return tier.describe()["members"][0]["state"]


def test_lookups_while_every_lane_is_busy_do_not_count_as_failures(store, tmp_path):
    tier, hold = store(takes_s=0.0, deadline_s=60.0), tmp_path / "hold"
    wait_until_started(tier)
    hold.touch()
    ended, threads = read_in_parallel(tier, LANES)
    while not tier._child._process._free.empty():
        time.sleep(0.001)
    assert [tier.held(BLOCKS.namespace, [b"k" * 16], 0) for _ in range(2)] == [0, 0]
    assert tier.reachable()
    assert state(tier) == "active"
    hold.unlink()
    for thread in threads:
        thread.join(60)
    assert ended == [Outcome.OK] * LANES


def test_a_call_that_gets_its_lane_late_does_not_kill_the_client(store, monkeypatch):
    monkeypatch.setattr(module, "LIMITS", module.LIMITS._replace(hung_s=60.0))
    tier = store(takes_s=6.0, deadline_s=9.0)
    wait_until_started(tier)
    client = tier._child._process
    ended, threads = read_in_parallel(tier, 2 * LANES)
    for thread in threads:
        thread.join(30)
    assert sorted(ended) == [Outcome.LATE] * LANES + [Outcome.OK] * LANES
    assert client._popen.poll() is None
    while client._late:
        client._release_answered()
        time.sleep(0.01)
    assert tier.read(BLOCKS.gets([0])) == [Outcome.OK]
    assert tier._child._process is client


def test_a_call_that_raises_in_the_client_is_gone_at_once_and_the_client_is_replaced(
    store, tmp_path
):
    tier, fail = store(takes_s=0.0, deadline_s=30.0), tmp_path / "fail"
    wait_until_started(tier)
    before = tier._child.pid
    fail.touch()
    assert tier.read(BLOCKS.gets([0])) == [Outcome.GONE], "not LATE: nothing waits for an answer"
    fail.unlink()
    wait_until_started(tier)
    assert tier._child.pid != before
    assert tier.read(BLOCKS.gets([0])) == [Outcome.OK]


def test_a_wait_for_a_starting_client_does_not_count_as_a_failure(store):
    tier = store(takes_s=0.0, starts_s=60.0)  # it is killed before
    for _ in range(3):
        assert tier.held(BLOCKS.namespace, [b"k" * 16], 0) == 0
    assert tier.reachable()
    assert state(tier) == "active"


def test_a_client_that_cannot_be_started_leaves_no_memory_behind(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(child_process.subprocess, "Popen", refuse)
    with pytest.raises(PermissionError):
        child_process.LaneProcess(module.client_program(1 << 20), "")
    gc.collect()
    open_files = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            open_files.append(str(fd.readlink()))
    assert not [name for name in open_files if "holdfast-mooncake" in name]


def test_a_waiting_call_gets_a_lane_whose_late_answer_arrives(store, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "LIMITS", module.LIMITS._replace(hung_s=60.0))
    tier, hold = store(takes_s=0.0, deadline_s=5.0), tmp_path / "hold"
    wait_until_started(tier)
    client = tier._child._process
    lanes = [client.acquire(Deadline.within(60.0)) for _ in range(LANES)]
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(client.acquire(Deadline.within(60.0))))
    waiting.start()
    hold.touch()
    with pytest.raises(TimeoutError):
        lanes[0].ask(encode(ClientRequest("exist", ["slow"])), Deadline.within(0.2))
    assert client.set_late(lanes[0])
    hold.unlink()
    waiting.join(60)
    assert taken == [lanes[0]]
