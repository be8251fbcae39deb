"""Lookups of a context in several KV groups: the longest resume that all groups hold."""

import pytest

from holdfast.blocks.fingerprint import KvGroup
from holdfast.blocks.group_rules import GroupRule
from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.plan.planner import FetchHeld
from holdfast.store.estimates import EngineId
from holdfast.store.group_lookup import GroupChain, cover_groups, look_groups, plan_groups
from holdfast.store.lookup import PromptTokens
from holdfast.testing.memory import MemoryTier, SharedMemoryTier

MIB = 1 << 20
PAYLOAD = 16 << 10
TOKENS = 16
ENGINE = EngineId("test", "f")
BLOCKS = 12
KINDS = {
    "full": KvGroup("full", 0, (0,)),
    "window": KvGroup("window", 33, (1,)),
    "state": KvGroup("recurrent", 0, (2,)),
}


class Groups:
    """A context in three groups, and a store whose blocks are chosen one by one."""

    def __init__(self, harness, *tiers, **options):
        self.harness = harness(4 * MIB, *tiers, **({"planner": FetchHeld()} | options))
        key, domain = self.harness.store.domain("default")
        self.chains = {}
        for name, group in KINDS.items():
            namespace = Namespace(name.encode().ljust(16, b"."), domain, PAYLOAD, TOKENS)
            chain = Chain(key, namespace.fingerprint, TOKENS)
            chain.extend(range(BLOCKS * TOKENS))
            rule = GroupRule.of(group, TOKENS)
            self.chains[name] = GroupChain(namespace, rule, chain.keys), chain

    @property
    def all(self):
        return [group for group, _ in self.chains.values()]

    def save(self, name, blocks):
        (namespace, _, keys), chain = self.chains[name]
        store = self.harness.store
        for block in blocks:
            reserved = store.reserve(
                namespace, [keys[block]], chain.parent(block), block, chain.segment(block)
            )
            self.harness.fill([keys[block]], reserved.places)
            store.commit(reserved.ticket)

    def cover(self, **given):
        return cover_groups(self.harness.store, self.all, **given)

    def plan(self, tokens=BLOCKS * TOKENS + 1, have=0):
        prompt = PromptTokens(ENGINE, tokens, have, limit_s=5.0)
        return plan_groups(self.harness.store, self.all, prompt)


@pytest.fixture
def groups(harness):
    return Groups(harness)


def test_all_groups_must_hold_what_a_resume_needs(groups):
    groups.save("full", range(BLOCKS))
    assert groups.cover() == 0
    groups.save("window", range(BLOCKS))
    assert groups.cover() == 0
    groups.save("state", [4, 8])
    assert groups.cover() == 9 * TOKENS
    assert groups.cover(limit=9 * TOKENS - 1) == 5 * TOKENS


def test_a_window_needs_its_last_blocks_only(groups):
    groups.save("full", range(BLOCKS))
    groups.save("state", range(BLOCKS))
    groups.save("window", [6, 7])
    assert groups.cover() == 8 * TOKENS


def test_a_group_without_its_blocks_is_a_miss(groups):
    for name in ("window", "state"):
        groups.save(name, range(BLOCKS))
    assert groups.plan().held == 0
    groups.save("full", range(1, BLOCKS))
    assert groups.plan().held == 0


def test_blocks_that_the_engine_has_need_not_be_held(groups):
    groups.save("full", range(5, 9))
    groups.save("window", range(5, 9))
    groups.save("state", [8])
    assert groups.cover() == 0
    assert groups.cover(have=5 * TOKENS) == 9 * TOKENS


def test_a_plan_resumes_before_the_last_token_of_the_prompt(groups):
    for name in KINDS:
        groups.save(name, range(BLOCKS))
    assert groups.plan(BLOCKS * TOKENS).held == BLOCKS - 1
    planned = groups.plan()
    assert (planned.held, planned.plan.blocks) == (BLOCKS, BLOCKS)
    assert planned.sources == {"host": BLOCKS}
    assert planned.number


def test_a_cut_of_the_planner_moves_down_to_a_resume_point(harness):
    class Half:
        def plan(self, question):
            return FetchHeld().plan(question)._replace(blocks=len(question.tiers) // 2 + 1)

    groups = Groups(harness, planner=Half())
    for name in ("full", "window"):
        groups.save(name, range(BLOCKS))
    groups.save("state", [3, 10])
    planned = groups.plan()
    assert (planned.held, planned.plan.blocks) == (11, 4)


def test_groups_with_larger_blocks_set_the_unit(groups, harness):
    del harness
    (namespace, _, _), _ = groups.chains["full"]
    big = Chain(groups.harness.store.domain("default")[0], b"g" * 16, 4 * TOKENS)
    big.extend(range(BLOCKS * TOKENS))
    wide = namespace._replace(fingerprint=b"g" * 16, block_tokens=4 * TOKENS)
    rule = GroupRule("window", 20, 4 * TOKENS, 4 * TOKENS)
    groups.chains["window"] = GroupChain(wide, rule, big.keys), big
    groups.save("full", range(BLOCKS))
    groups.save("state", range(BLOCKS))
    groups.save("window", [1])
    planned = groups.plan()
    assert (planned.held, planned.plan.blocks) == (2, 2)


def test_the_slowest_tier_of_a_block_counts(harness):
    groups = Groups(harness, MemoryTier(4 * MIB))
    for name in KINDS:
        groups.save(name, range(BLOCKS))
    groups.harness.leave_memory()
    assert groups.plan().sources == {"memory": BLOCKS}


def test_shared_tiers_are_asked_about_every_group(harness):
    by_key = {}
    one, other = (Groups(harness, SharedMemoryTier(by_key, "pool")) for _ in range(2))
    one.save("full", range(BLOCKS))
    one.save("window", range(BLOCKS))
    one.save("state", [8, 10])
    one.harness.flush()
    assert other.cover() == 0
    unanswered = look_groups(other.harness.store, other.all)
    assert other.cover() == 11 * TOKENS
    assert unanswered == {}
    assert other.plan().sources == {"pool": 11}


def test_a_shared_tier_that_is_away_is_named(harness):
    tier = SharedMemoryTier({}, "pool")
    groups = Groups(harness, tier)
    groups.save("full", range(2))
    tier.reachable = lambda: False
    assert look_groups(groups.harness.store, groups.all) == {"pool": Outcome.GONE}
    assert groups.plan().unanswered == {"pool": Outcome.GONE}
