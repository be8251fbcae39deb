"""The Valkey tier keeps the shared tier's contract on one real server and on a real cluster."""

import pytest

from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.valkey.kind import ValkeyOptions
from holdfast.tiers.valkey.tier import ValkeyTier

DEADLINE_S = 6.0


def options(servers, **more):
    cluster = len(servers.endpoints) > 1
    more = {"deadline_s": DEADLINE_S, "ask_s": DEADLINE_S, **more}
    return ValkeyOptions(address=list(servers.addresses), cluster=cluster, **more)


class ReusedServers:
    """Servers that several tests use one after the other; `close` empties or restarts them."""

    def __init__(self, servers):
        self.servers = servers

    def __getattr__(self, name):
        return getattr(self.servers, name)

    def close(self):
        if self.servers.processes:
            for endpoint in self.servers.endpoints:
                assert self.servers.ask(endpoint, "FLUSHALL") == b"OK"
        else:
            self.servers.restart()


class TestOneServer(SharedTierContract):
    deadline_s = DEADLINE_S
    nodes = 1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _servers(cls, class_servers):
        cls.servers = class_servers(cls.nodes)

    def make_remote_side(self, folder):
        return ReusedServers(self.servers)

    def make_tier(self, remote_side):
        return ValkeyTier(options(remote_side))


class TestCluster(TestOneServer):
    nodes = 3
