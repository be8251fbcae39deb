"""A target as a member of a pool: what a host makes of its refusals."""

import contextlib
import time

import pytest

from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetLimits, TargetService
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.tiers.base import TierPut, segment_place
from holdfast.tiers.breaker import BreakerPhase
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote import token
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials
from holdfast_bench.harness.pool import ManualMembers

KEY = bytes(range(32))
NAMESPACE = namespace_of(8_000)
PATIENT = PoolTierOptions(deadline_s=60.0, ask_s=60.0, stripe_targets=1)


def put(number):
    key = key_of(number)
    return TierPut(segment_place(key[:8]), record_of(NAMESPACE, key))


def until(condition, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.fixture
def pool():
    """Call to make a pool of one target; all are closed with the test."""
    with contextlib.ExitStack() as undo:

        def make(address, credentials=None):
            source = ManualMembers([Member(id="t0", address=address)])
            tier = PoolTier(
                source, lambda member: TargetClient(member.address, credentials), PATIENT
            )
            undo.callback(tier.close)
            return tier

        yield make


def test_a_host_whose_token_permits_only_writes_uses_a_member_again_after_an_outage(pool, tmp_path):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(token.issue(KEY, "host-a", ("write",), 600, time.time()))
    rules = EntryRules(token_keys=lambda: [KEY])
    with Store(16 * MIB, [], {}, StoreOptions(serves_peers=True)) as store:
        store.start()
        service = TargetService(store)
        listener = bind("tcp://127.0.0.1:0")
        address = address_of(listener)
        first = TargetServer(listener, service, rules)
        first.start()
        tier = pool(address, Credentials(None, str(file)))
        assert tier.write([put(1)]) == [Outcome.OK]
        first.close()
        until(lambda: tier.write([put(2)]) and not tier.reachable())
        with contextlib.closing(TargetServer(bind(address), service, rules)) as again:
            again.start()
            until(lambda: tier.write([put(3)]) == [Outcome.OK])
            assert tier.health.reports()[0].phase is BreakerPhase.CLOSED
            tier.close()


def test_a_host_does_not_take_a_member_for_failed_that_has_no_connection_free(
    pool, serve_here, caplog
):
    node = serve_here(NAMESPACE, TargetLimits(connections=1))
    with node.connect():
        tier = pool(node.address)
        for number in range(20):
            assert tier.write([put(number)]) == [Outcome.LATE]
        [health] = tier.member_health()
        assert health.trouble.startswith("busy: the target serves 1 connections")
        assert (health.phase, health.ejected) == (BreakerPhase.CLOSED, False)
        assert (health.breaker_opened, health.failure_share) == (0, 0.0)
        assert tier.usage().failures == 0
        assert tier.reachable()
        assert node.service.status().turned_away
    until(lambda: tier.write([put(2)]) == [Outcome.OK])
    assert not tier.member_health()[0].trouble
    assert "has no connection free: busy: the target serves" in caplog.text
    assert f"pool member t0 at {node.address} answers again" in caplog.text
