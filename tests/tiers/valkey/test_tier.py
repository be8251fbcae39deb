"""The Valkey tier keeps the shared tier's contract on one real server and on a real cluster."""

import contextlib

import pytest

from holdfast.errors import Outcome
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.base import Place, TierGet, TierPut
from holdfast.tiers.unverified_records import UNVERIFIED_MAX
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


def test_a_record_of_another_length_is_replaced_even_if_many_were_found(monkeypatch):
    namespace, replaced = namespace_of(300), []

    class Connection:
        def get(self, wanted, _deadline):
            return [None] * len(wanted)

        def put(self, records, _ttl_s, _deadline, names):
            replaced.append(len(names))
            return [b"OK"] * len(records)

    def run(_call, numbers, work, _deadline):
        work(None, Connection(), list(numbers))

    with contextlib.closing(ValkeyTier(ValkeyOptions(address="tcp://127.0.0.1:9"))) as tier:
        monkeypatch.setattr(tier, "_run", run)
        into, last = memoryview(bytearray(namespace.slot_bytes)), key_of(UNVERIFIED_MAX)
        keys = [key_of(number) for number in range(UNVERIFIED_MAX + 1)]
        gets = [TierGet(Place(0), key, into, namespace) for key in keys]
        assert set(tier.read(gets)) == {Outcome.MISS}
        put = TierPut(Place(0), record_of(namespace, last))
        assert [tier.write([put]), tier.write([put])] == [[Outcome.OK]] * 2
    assert replaced == [1, 0]
