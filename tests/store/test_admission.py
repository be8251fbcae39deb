"""A lower tier's rule is asked before each write, and told of each use."""

from holdfast.blocks.namespace import domain_id
from holdfast.policy.admit import AlwaysAdmit, SecondTouch
from holdfast.policy.retention import Retention
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_view import StoreView
from holdfast_bench.campaigns.contexts import Contexts, chain_of

MIB = 1 << 20
SECRET = b"s" * 32


class Counting(AlwaysAdmit):
    """A write budget without end that counts what it is asked for."""

    asked = 0

    def admit(self, block, now_s):
        self.asked += 1
        return super().admit(block, now_s)


def choosy(harness):
    """A store whose lower tier takes blocks at their second use, and how many fit into memory."""
    rules = {1: TierRules(lambda _: SecondTouch(1_000))}
    one = harness(MIB, MemoryTier(64 * MIB), rules=rules)
    return one, one.view.slots(one.namespace)


def below(one):
    return one.tier.usage().records


def test_a_context_used_once_is_not_written_and_is_lost_when_it_is_evicted(harness):
    one, slots = choosy(harness)
    chain = one.chain(1, 4)
    one.save(chain)
    one.save(one.chain(2, slots))
    one.flush()
    assert below(one) == 0
    assert one.store.cover(one.namespace, chain.keys).blocks == 0


def test_a_context_used_twice_is_written_before_it_is_evicted(harness):
    one, slots = choosy(harness)
    chain = one.chain(1, 4)
    one.save(chain)
    assert one.read(chain) == 4
    for seed in range(2, 12):
        one.save(one.chain(seed, slots // 2))
        one.flush()
    assert below(one) >= 4
    assert one.read(chain) == 4


def test_an_evicted_context_that_is_saved_again_counts_as_used_before(harness):
    one, slots = choosy(harness)
    chain = one.chain(1, 4)
    one.save(chain)
    one.save(one.chain(2, slots))
    one.save(chain)
    one.flush()
    assert below(one) == 4


def test_a_durable_context_is_written_even_if_the_admission_rule_refuses_it(harness):
    one, _ = choosy(harness)
    chain = one.chain(1, 4)
    reserved = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    one.fill(chain.keys, reserved.places)
    one.store.commit(reserved.ticket, Retention.DURABLE)
    one.flush()
    assert below(one) == 4


def test_blocks_that_a_tier_already_holds_charge_no_write_budget(harness):
    budget = Counting()
    rules = {1: TierRules(budgets={domain_id(SECRET): budget})}
    one = harness(MIB, MemoryTier(64 * MIB), rules=rules)
    chain = one.chain(1, 4)
    for blocks in (3, 4, 4):
        one.save(chain, 0, blocks, Retention.DURABLE)
        one.flush()
    assert (below(one), budget.asked) == (4, 4)


def test_a_durable_save_charges_no_budget_for_blocks_that_are_not_in_memory(harness):
    budget, pool = Counting(), SharedMemoryTier({})
    rules = {1: TierRules(lambda _: SecondTouch(1_000), budgets={domain_id(SECRET): budget})}
    one = harness(MIB, MemoryTier(64 * MIB, name="disk"), pool, rules=rules)
    chain = one.chain(1, 4)
    one.save(chain)
    one.leave_memory(chain)
    one.save(chain, retention=Retention.DURABLE)
    one.flush()
    assert (len(pool.records), below(one), budget.asked) == (4, 0, 0)


def test_every_block_is_written_if_there_is_no_admission_rule(harness):
    one = harness(MIB, MemoryTier(64 * MIB))
    one.save(one.chain(1, 4))
    one.flush()
    assert below(one) == 4


def test_a_block_held_by_another_tier_is_offered_at_its_second_use() -> None:
    disk, pool = MemoryTier(64 * MIB, name="disk"), SharedMemoryTier({})
    options = StoreOptions(rules={1: TierRules(lambda _: SecondTouch(1_000))})
    with Store(4 * MIB, [disk, pool], {"default": SECRET}, options) as store:
        store.start()
        contexts = Contexts(store, 16 << 10)
        once, twice = chain_of("once", 4), chain_of("twice", 4)
        for chain in (once, twice):
            contexts.save(chain)
        flush(store)
        assert (disk.usage().records, len(pool.records)) == (0, 8)
        contexts.read(twice)
        flush(store)
        assert disk.usage().records == 4


def flush(store) -> None:
    StoreView(store).wait_until_written()
