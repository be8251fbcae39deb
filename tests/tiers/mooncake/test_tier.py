"""The Mooncake tier keeps the shared tier's contract with a real master and memory server."""

import contextlib
import threading

import pytest

from holdfast.byte_size import Size
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.mooncake.kind import MooncakeOptions
from holdfast.tiers.mooncake.tier import MooncakeTier
from holdfast_bench.peers.mooncake_server import MooncakeServers

DEADLINE_S = 6.0
LANE_BYTES = 16 << 20


@pytest.mark.usefixtures("_mooncake")
class TestMooncakeTier(SharedTierContract):
    deadline_s = DEADLINE_S

    def make_remote_side(self, folder):
        servers = MooncakeServers(folder / "servers", 256 << 20)
        servers.start()
        return servers

    def make_tier(self, remote_side):
        return MooncakeTier(
            MooncakeOptions(
                master=remote_side.address,
                lane=Size(LANE_BYTES),
                deadline_s=DEADLINE_S,
                ask_s=DEADLINE_S,
            )
        )


def test_a_lookup_does_not_wait_for_a_write_that_waits_for_the_master(monkeypatch):
    pytest.importorskip("mooncake")
    dialled, answered = threading.Event(), threading.Event()

    def dial(_endpoint, _deadline):
        dialled.set()
        answered.wait(250)
        raise ConnectionRefusedError

    monkeypatch.setattr("holdfast.tiers.mooncake.tier.dial", dial)
    options = MooncakeOptions(master="tcp://127.0.0.1:9", deadline_s=30.0, ask_s=0.2)
    blocks = ChainedBlocks(4_000)
    with contextlib.closing(MooncakeTier(options)) as tier:
        writer = threading.Thread(target=blocks.save, args=(tier, range(2)))
        writer.start()
        assert dialled.wait(10)
        assert tier.held(blocks.namespace, blocks.keys(2), 0) == 0
        assert writer.is_alive()  # it still waits for the server
        answered.set()
        writer.join(30)
