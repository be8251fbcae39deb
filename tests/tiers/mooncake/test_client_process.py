"""Mooncake's client lives in a process of its own: what becomes of it is never our trouble."""

import logging
import os
import signal
import time

import pytest

from holdfast.errors import ConfigError, Outcome
from holdfast.pause import pause
from holdfast.probe import free_port
from holdfast.rig.mooncake_server import MooncakeServers
from holdfast.testing.chained import Chained
from holdfast.tiers.mooncake import tier as module
from holdfast.tiers.mooncake.tier import MooncakeOptions, MooncakeTier

MIB = 1 << 20


@pytest.fixture
def master(_mooncake, tmp_path):
    servers = MooncakeServers(tmp_path, 128 * MIB)
    servers.start()
    yield servers.address
    servers.close()


@pytest.fixture
def tier(master):
    tier = MooncakeTier(MooncakeOptions(master=master, lane_bytes=4 * MIB, ask_s=2.0))
    yield tier
    tier.close()


def eventually(what, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_client_that_is_killed_is_replaced(tier):
    blocks = Chained(65_000)
    assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    os.kill(tier._process._popen.pid, signal.SIGKILL)
    eventually(lambda: blocks.load(tier, range(3)) == [Outcome.OK] * 3)


def test_a_client_that_hangs_is_late_then_replaced(tier):
    blocks = Chained(65_000)
    assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    hung = tier._process._popen
    pause(hung.pid)
    assert blocks.load(tier, range(3)) == [Outcome.LATE] * 3
    assert hung.poll() == -signal.SIGKILL
    eventually(lambda: blocks.load(tier, range(3)) == [Outcome.OK] * 3)


def test_its_end_leaves_no_process(tier):
    Chained(4_000).save(tier, [0])
    client = tier._process._popen
    tier.close()
    assert client.poll() is not None


def test_a_batch_larger_than_a_lane_goes_in_pieces(tier):
    blocks = Chained(1 * MIB)
    assert blocks.save(tier, range(12)) == [Outcome.OK] * 12
    assert blocks.load(tier, range(13)) == [Outcome.OK] * 12 + [Outcome.MISS]


def test_a_record_larger_than_a_lane_is_refused_with_the_remedy(tier, caplog):
    large, small = Chained(5 * MIB), Chained(4_000)
    assert tier.write(large.puts([0]) + small.puts([0])) == [Outcome.FULL, Outcome.OK]
    assert tier.read(large.gets([0]) + small.gets([0])) == [Outcome.MISS, Outcome.OK]
    assert "raise the tier's lane" in caplog.text


def test_a_store_without_room_is_full_or_makes_room(tier):
    blocks = Chained(3 * MIB)
    outcomes = {outcome for n in range(60) for outcome in blocks.save(tier, [n])}
    assert outcomes <= {Outcome.OK, Outcome.FULL}
    assert Outcome.OK in outcomes


@pytest.mark.usefixtures("_mooncake")
def test_nobody_at_the_address_is_gone_at_once_and_said_once(caplog, standstills):
    tier = MooncakeTier(MooncakeOptions(master=f"tcp://127.0.0.1:{free_port()}"))
    blocks = Chained(4_000)
    begun_s = time.monotonic()
    for _ in range(30):
        assert blocks.load(tier, [0]) == [Outcome.GONE]
    assert standstills.since(begun_s) < 2.0
    tier.close()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[mooncake\]'"):
        MooncakeTier(MooncakeOptions(master="tcp://127.0.0.1:1"))
