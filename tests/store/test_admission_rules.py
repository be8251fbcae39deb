"""The rules of a store are told of every use, and where the block was found."""

from holdfast.policy.admit import Admission
from holdfast.status import AdmissionStatus
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import leave
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier
from holdfast_bench.campaigns.contexts import Contexts, chain_of

MIB = 1 << 20


class Listening(Admission):
    """Takes everything, and notes what it is told."""

    def __init__(self):
        self.told, self.given_up = [], []

    def used(self, block, now_s, *, at_hand=False):
        self.told.append((block.name, block.uses, block.group[1], at_hand))

    def allows(self, block, now_s):
        return True

    def gave_up(self, name, now_s):
        self.given_up.append(name)

    def figures(self):
        return {"told": float(len(self.told))}


def store_with(rule, cxl_bytes=16 * MIB):
    lower = [CxlTier(CxlOptions(capacity=cxl_bytes)), MemoryTier(64 * MIB, name="disk")]
    options = StoreOptions(rules={1: TierRules(lambda _: rule)})
    store = Store(MIB, lower, {"default": b"s" * 32}, options)
    store.start()
    return store


def test_a_rule_learns_of_each_use_whether_a_faster_tier_held_the_block():
    rule = Listening()
    with store_with(rule) as store:
        contexts, chain = Contexts(store, 16 << 10), chain_of("a", 1)
        contexts.save(chain)
        contexts.wait_written()
        contexts.read(chain)
        contexts.leave_host(chain)
        contexts.read(chain)
        leave(store, contexts.namespace, chain, 0, 1)
        contexts.read(chain)
    key = rule.told[0][0]
    assert key.endswith(chain[0])
    assert rule.told == [
        (key, 1, 1, False),  # saved: nobody had it
        (key, 2, 2, True),  # from memory
        (key, 3, 3, False),  # from CXL itself
        (key, 4, 4, False),  # from the disk
    ]


def test_a_rule_learns_of_evictions_and_its_counters_appear_in_status():
    rule = Listening()
    with store_with(rule, 2 * MIB) as store:
        contexts = Contexts(store, 16 << 10)
        chains = [chain_of(f"c{n}", 16) for n in range(12)]
        for chain in chains:
            contexts.save(chain)
            contexts.wait_written()
        saved = [key for chain in chains for key in chain]
        given_up = [name[-16:] for name in rule.given_up]
        assert len(set(given_up)) == len(given_up) >= 12 * 16 - 128
        assert set(given_up) <= set(saved)
        assert store.status().admission == [AdmissionStatus("cxl", {"told": 12.0 * 16})]


def test_a_rule_that_admits_everything_adds_no_work_and_no_status():
    with Store(MIB, [MemoryTier(64 * MIB)], {"default": b"s" * 32}) as store:
        assert store.status().admission == []
