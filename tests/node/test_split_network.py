"""A network that is split: both sides serve what they reach, late by a deadline at most."""

import time
from contextlib import ExitStack

import pytest

from holdfast_bench.harness import pool as rig_pool
from holdfast_bench.harness.network import open_network
from holdfast_bench.harness.pool import PoolUnderTest

pytest.importorskip("cryptography", reason="hosts seal what leaves them")

DEADLINE_S = 1.0
"""What this machine may take besides, with everything else that it does."""

CONTEXTS = 6
BLOCKS = 4


@pytest.fixture
def sides(tmp_path, monkeypatch, engine):
    """Two targets and two hosts in network namespaces: engines by host, and the second's cable."""
    for name in ("TARGET_HOST_BYTES", "TARGET_DISK_BYTES", "HOST_BYTES"):
        monkeypatch.setattr(rig_pool, name, 64 << 20)
    monkeypatch.setattr(rig_pool, "DEADLINE_S", DEADLINE_S)
    with open_network(tmp_path / "network.log") as network, ExitStack() as stack:
        if not network.cuts:
            pytest.skip("network namespaces need root, ip, unshare, and a kernel that allows them")
        pool = PoolUnderTest(stack, tmp_path, network)
        pool.start_targets(2)
        here = pool.start_host("here")
        given, give = [], network.host

        def host():
            given.append(give())
            return given[-1]

        monkeypatch.setattr(network, "host", host)
        there = pool.start_host("there")
        engines = engine(here.address), engine(there.address)
        yield Sides(pool, *engines, network, given[0].address)


class Sides:
    def __init__(self, pool, here, there, network, address):
        self.here, self.there = here, there
        self._pool, self._network, self._address = pool, network, address

    def split(self):
        self._pool.renew_token()
        self._network.cut(self._address)

    def mend(self):
        self._network.mend(self._address)


def saved(engine, names, name):
    keys = names(name, BLOCKS)
    engine.save(keys)
    engine.until(lambda status: status["waiting_to_write"] == 0)
    return keys


def read(engine, keys):
    """Ask and read as an engine does, every byte checked; return how many blocks came."""
    landed, _ = engine.read(keys[: engine.cover(keys)])
    return landed


def until_read(engine, keys, within_s=120):
    end_s = time.monotonic() + within_s
    while (landed := read(engine, keys)) < len(keys) and time.monotonic() < end_s:
        time.sleep(0.2)
    return landed


def split_and_mend(sides, names, run):
    contexts = [saved(sides.here, names, f"{run} before {number}") for number in range(CONTEXTS)]
    assert until_read(sides.there, contexts[0]) == BLOCKS
    sides.split()
    assert [read(sides.there, keys) for keys in contexts[1:]] == [0] * (CONTEXTS - 1)
    assert read(sides.there, contexts[0]) == BLOCKS  # it is in that host's own memory
    alone = names(f"{run} of both sides", BLOCKS)
    assert sides.there.save(alone) == sides.here.save(alone) == BLOCKS
    assert read(sides.there, alone) == read(sides.here, alone) == BLOCKS
    during = saved(sides.here, names, f"{run} during")
    sides.mend()
    for keys in (*contexts[1:], during):
        assert until_read(sides.there, keys) == BLOCKS
    after = saved(sides.there, names, f"{run} after")
    assert until_read(sides.here, after) == BLOCKS


def test_a_partitioned_host_recomputes_and_other_hosts_are_unaffected(sides, names):
    split_and_mend(sides, names, 0)


@pytest.mark.soak
def test_network_partitions_heal_repeatedly_for_the_soak_time(sides, names, soak_s):
    end_s, runs = time.monotonic() + soak_s, 0
    while time.monotonic() < end_s:
        runs += 1
        split_and_mend(sides, names, runs)
    assert runs
