"""The Mooncake tier keeps the shared tier's promises with a real master and a real lender."""

import pytest

from holdfast.rig.mooncake_server import MooncakeServers
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.mooncake.tier import MooncakeOptions, MooncakeTier

DEADLINE_S = 2.0
LANE_BYTES = 16 << 20


@pytest.mark.usefixtures("_mooncake")
class TestMooncakeTier(SharedTierContract):
    deadline_s = DEADLINE_S

    def make_far_side(self, folder):
        servers = MooncakeServers(folder / "servers", 256 << 20)
        servers.start()
        return servers

    def make_tier(self, far_side):
        return MooncakeTier(
            MooncakeOptions(
                master=far_side.address,
                lane_bytes=LANE_BYTES,
                deadline_s=DEADLINE_S,
                ask_s=DEADLINE_S,
            )
        )
