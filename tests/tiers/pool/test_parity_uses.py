"""What the members of a pool are told about parity records in use."""

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.limits import CHAIN_BLOCKS_MAX, STRIPE_TARGETS_MAX
from holdfast.membership.members import Member
from holdfast.membership.membership import Membership, MembershipOptions
from holdfast.testing.payloads import key_of, namespace_of
from holdfast.tiers.base import TierGet, segment_place
from holdfast.tiers.pool.chain_links import ChainLinks
from holdfast.tiers.pool.lookup import SegmentLookup
from holdfast.tiers.pool.parity_uses import ParityUses
from holdfast.tiers.pool.pool_calls import PoolCalls

NAMESPACE = namespace_of(8_000)


def test_rows_beyond_the_limit_of_a_message_are_named_in_a_further_one() -> None:
    """A target refuses a longer message, which would count as its failure."""
    clock, links, told = ManualClock(1.0), ChainLinks(512), []
    membership = Membership(clock, MembershipOptions())
    membership.observe([Member(id="t0", address="tcp://10.0.0.1:7000")])
    lookup = SegmentLookup(membership, lambda _: True, stripe=STRIPE_TARGETS_MAX)

    def each(items, act):
        for item in items:
            act(item)

    def use(_member, _part, _namespace, keys):
        told.append(keys)

    calls = PoolCalls(each, None, None, None, None, use, None)
    uses = ParityUses(clock, lookup, links, calls)
    keys = [key_of(number) for number in range(CHAIN_BLOCKS_MAX // (STRIPE_TARGETS_MAX - 1) + 1)]
    for key in keys:
        links.note([key], 0)
    gets = [TierGet(segment_place(key[:8]), key, memoryview(b""), NAMESPACE) for key in keys]
    uses.note(gets, [Outcome.OK] * len(gets))
    uses.tell(60.0)
    assert max(map(len, told)) == CHAIN_BLOCKS_MAX
    rows = [row for message in told for row in message]
    assert len(set(rows)) == len(rows) == len(keys) * (STRIPE_TARGETS_MAX - 1)
