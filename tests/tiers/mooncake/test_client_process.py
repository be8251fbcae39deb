"""Failures of the process of Mooncake's client never become failures of the node."""

import logging
import os
import signal
import time

import pytest

from holdfast.byte_size import Size
from holdfast.errors import ConfigError, Outcome
from holdfast.probe import free_port
from holdfast.testing.chained import ChainedBlocks
from holdfast.tiers.mooncake import tier as module
from holdfast.tiers.mooncake.kind import MooncakeOptions
from holdfast.tiers.mooncake.tier import MooncakeTier
from holdfast_bench.harness.pause import pause
from holdfast_bench.peers.mooncake_server import MooncakeServers

MIB = 1 << 20


@pytest.fixture
def master(_mooncake, tmp_path):
    servers = MooncakeServers(tmp_path, 128 * MIB)
    servers.start()
    yield servers.address
    servers.close()


def eventually(condition, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.fixture
def tier(master):
    options = MooncakeOptions(master=master, lane=Size(4 * MIB), deadline_s=6.0, ask_s=6.0)
    tier = MooncakeTier(options)
    nothing = [Outcome.MISS]
    eventually(lambda: ChainedBlocks(4_000).load(tier, [0]) == nothing)  # its client has started
    yield tier
    tier.close()


def test_a_client_that_is_killed_is_replaced(tier):
    blocks = ChainedBlocks(65_000)
    assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    os.kill(tier._child.pid, signal.SIGKILL)
    eventually(lambda: blocks.load(tier, range(3)) == [Outcome.OK] * 3)


def test_a_client_that_hangs_is_late_then_replaced(tier):
    blocks = ChainedBlocks(65_000)
    assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    hung = tier._child._process._popen
    pause(hung.pid)
    assert blocks.load(tier, range(3)) == [Outcome.LATE] * 3
    assert hung.poll() == -signal.SIGKILL
    eventually(lambda: blocks.load(tier, range(3)) == [Outcome.OK] * 3)


def test_closing_the_tier_leaves_no_process(tier):
    ChainedBlocks(4_000).save(tier, [0])
    client = tier._child._process._popen
    tier.close()
    assert client.poll() is not None


def test_a_batch_larger_than_a_lane_is_divided_into_pieces(tier):
    blocks = ChainedBlocks(1 * MIB)
    assert blocks.save(tier, range(12)) == [Outcome.OK] * 12
    assert blocks.load(tier, range(13)) == [Outcome.OK] * 12 + [Outcome.MISS]


def test_a_record_larger_than_a_lane_is_refused_with_the_remedy(tier, caplog):
    large, small = ChainedBlocks(5 * MIB), ChainedBlocks(4_000)
    assert tier.write(large.puts([0]) + small.puts([0])) == [Outcome.FULL, Outcome.OK]
    assert tier.read(large.gets([0]) + small.gets([0])) == [Outcome.MISS, Outcome.OK]
    assert "raise the tier's lane" in caplog.text


def test_a_store_without_room_is_full_or_evicts(tier):
    blocks = ChainedBlocks(3 * MIB)
    outcomes = {outcome for n in range(60) for outcome in blocks.save(tier, [n])}
    assert outcomes <= {Outcome.OK, Outcome.FULL}
    assert Outcome.OK in outcomes


@pytest.mark.usefixtures("_mooncake")
def test_an_address_without_a_master_is_gone_and_logged_once(caplog):
    tier = MooncakeTier(MooncakeOptions(master=f"tcp://127.0.0.1:{free_port()}"))
    blocks = ChainedBlocks(4_000)
    for _ in range(30):
        assert blocks.load(tier, [0]) == [Outcome.GONE]
    tier.close()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_without_the_package_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast-kv\[mooncake\]'"):
        MooncakeTier(MooncakeOptions(master="tcp://127.0.0.1:1"))
