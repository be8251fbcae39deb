"""Who has to wait in line for Mooncake's client neither kills it nor blames the store."""

import os
import threading
import time
from socket import create_server

import pytest

from holdfast.errors import Outcome
from holdfast.testing.chained import Chained
from holdfast.tiers.mooncake import messages as m
from holdfast.tiers.mooncake import tier as module
from holdfast.tiers.mooncake.tier import LANES, MooncakeOptions, MooncakeTier
from holdfast.wire.stream import Deadline

SLOW_STORE = """
import time
class MooncakeDistributedStore:
    def setup(self, *settings): time.sleep({starts_s}); return 0
    def register_buffer(self, *memory): return 0
    def batch_get_into(self, keys, addresses, sizes): time.sleep({takes_s}); return list(sizes)
    def batch_is_exist(self, keys):
        time.sleep({asks_s} * (keys == ["slow"]))
        return [1] * len(keys)
"""
BLOCKS = Chained(4_000)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Call with how long a stand-in for Mooncake takes: returns a tier over it."""
    monkeypatch.setattr(module, "find_spec", lambda _: True)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    opened = []
    with create_server(("127.0.0.1", 0)) as master:

        def start(takes_s, starts_s=0.0, deadline_s=2.0, asks_s=0.0):
            (tmp_path / "mooncake").mkdir()
            (tmp_path / "mooncake" / "__init__.py").touch()
            text = SLOW_STORE.format(takes_s=takes_s, starts_s=starts_s, asks_s=asks_s)
            (tmp_path / "mooncake" / "store.py").write_text(text)
            address = f"tcp://127.0.0.1:{master.getsockname()[1]}"
            options = MooncakeOptions(master=address, lane_bytes=1 << 20, deadline_s=deadline_s)
            opened.append(MooncakeTier(options))
            return opened[-1]

        yield start
        for tier in opened:
            tier.close()


def until_started(tier):
    end_s = time.monotonic() + 20
    while not tier.held(BLOCKS.world, [b"k" * 16], 0):
        assert time.monotonic() < end_s


def beside(tier, number):
    """Read a block so many times at once; return what became of them, as it comes."""
    ended = []

    def read():
        ended.extend(tier.read(BLOCKS.gets([0])))

    threads = [threading.Thread(target=read) for _ in range(number)]
    for thread in threads:
        thread.start()
    return ended, threads


def state(tier):
    return tier.describe()["members"][0]["state"]


def test_questions_that_find_every_lane_busy_say_nothing_against_the_store(store):
    tier = store(takes_s=1.0, deadline_s=10.0)
    until_started(tier)
    ended, threads = beside(tier, LANES)
    time.sleep(0.3)
    assert [tier.held(BLOCKS.world, [b"k" * 16], 0) for _ in range(2)] == [0, 0]
    assert tier.reachable()
    assert state(tier) == "active"
    for thread in threads:
        thread.join(30)
    assert ended == [Outcome.OK] * LANES


def test_a_call_that_got_its_lane_late_leaves_the_client_to_the_others(store):
    tier = store(takes_s=0.6, deadline_s=0.9)
    until_started(tier)
    client = tier._process
    ended, threads = beside(tier, 2 * LANES)
    for thread in threads:
        thread.join(30)
    assert sorted(ended) == [Outcome.LATE] * LANES + [Outcome.OK] * LANES
    assert client._popen.poll() is None
    time.sleep(1.0)
    assert tier.read(BLOCKS.gets([0])) == [Outcome.OK]
    assert tier._process is client


def test_who_waits_for_a_client_that_starts_blames_nobody(store):
    tier = store(takes_s=0.0, starts_s=2.0)
    for _ in range(3):
        assert tier.held(BLOCKS.world, [b"k" * 16], 0) == 0
    assert tier.reachable()
    assert state(tier) == "active"


def test_who_waits_gets_a_lane_that_was_owed_later(store):
    tier = store(takes_s=0.0, deadline_s=5.0, asks_s=0.6)
    until_started(tier)
    client = tier._process
    lanes = [client.take(Deadline.within(5.0)) for _ in range(LANES)]
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(client.take(Deadline.within(20.0))))
    waiting.start()
    time.sleep(0.1)
    with pytest.raises(TimeoutError):
        lanes[0].ask(m.Exist(["slow"]), Deadline.within(0.2))
    assert client.owe(lanes[0])
    waiting.join(10)
    assert taken == [lanes[0]]
