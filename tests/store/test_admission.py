"""A lower tier's rule is asked before each write, and told of each use."""

import time

from holdfast.policy.admit import Always, SecondTouch
from holdfast.policy.retention import Retention
from holdfast.store.store import Store
from holdfast.testing.contexts import Contexts, chain_of
from holdfast.testing.memory import MemoryTier, SharedMemoryTier

MIB = 1 << 20


def choosy(rig):
    """A store whose lower tier takes blocks at their second use, and how many fit into memory."""
    one = rig(MIB, MemoryTier(64 * MIB))
    one.store.states.rules.choose(1, SecondTouch(1_000))
    return one, one.store.states.host(one.world).slots(one.world.record_bytes)


def below(one):
    return one.tier.usage().records


def test_what_was_used_once_is_not_written_and_leaves_for_good(rig):
    one, slots = choosy(rig)
    chain = one.chain(1, 4)
    one.save(chain)
    one.save(one.chain(2, slots))
    one.settle()
    assert below(one) == 0
    assert one.store.cover(one.world, chain.keys).blocks == 0


def test_what_was_used_again_is_written_before_it_leaves(rig):
    one, slots = choosy(rig)
    chain = one.chain(1, 4)
    one.save(chain)
    assert one.read(chain) == 4
    for seed in range(2, 12):
        one.save(one.chain(seed, slots // 2))
        one.settle()
    assert below(one) >= 4
    assert one.read(chain) == 4


def test_what_is_saved_anew_is_known_from_before(rig):
    one, slots = choosy(rig)
    chain = one.chain(1, 4)
    one.save(chain)
    one.save(one.chain(2, slots))
    one.save(chain)
    one.settle()
    assert below(one) == 4


def test_a_durable_context_is_written_whatever_the_rule_says(rig):
    one, _ = choosy(rig)
    chain = one.chain(1, 4)
    reserved = one.store.reserve(one.world, chain.keys, chain.fingerprint, 0)
    one.fill(chain.keys, reserved.places)
    one.store.commit(reserved.ticket, Retention.DURABLE)
    one.settle()
    assert below(one) == 4


def test_what_a_tier_has_already_costs_no_budget(rig):
    class Counting(Always):
        asked = 0

        def admit(self, block, now_s):
            self.asked += 1
            return super().admit(block, now_s)

    one = rig(MIB, MemoryTier(64 * MIB))
    budget = one.store.states.rules.budgets[0][one.world.domain] = Counting()
    chain = one.chain(1, 4)
    for blocks in (3, 4, 4):
        one.save(chain, 0, blocks, Retention.DURABLE)
        one.settle()
    assert (below(one), budget.asked) == (4, 4)


def test_without_a_rule_everything_is_written(rig):
    one = rig(MIB, MemoryTier(64 * MIB))
    one.save(one.chain(1, 4))
    one.settle()
    assert below(one) == 4


def test_a_block_that_another_tier_has_is_still_offered_at_its_second_use() -> None:
    disk, pool = MemoryTier(64 * MIB, name="disk"), SharedMemoryTier({})
    with Store(4 * MIB, [disk, pool], {"default": b"s" * 32}) as store:
        store.states.rules.choose(1, SecondTouch(1_000))
        store.start()
        contexts = Contexts(store, 16 << 10)
        once, twice = chain_of("once", 4), chain_of("twice", 4)
        for chain in (once, twice):
            contexts.save(chain)
        settle(store)
        assert (disk.usage().records, len(pool.records)) == (0, 8)
        contexts.read(twice)
        store.ladder.wake()
        settle(store)
        assert disk.usage().records == 4


def settle(store) -> None:
    end = time.monotonic() + 60
    while store.states.unwritten():
        assert time.monotonic() < end
        time.sleep(0.01)
