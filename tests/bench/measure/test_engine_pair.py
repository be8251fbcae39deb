"""Contexts are saved until the node has them, and put where they are said to be."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.measure import engine_pair as measuring
from holdfast_bench.measure.engine_pair import (
    POOL,
    PROBE_TOKENS,
    SAVED_S,
    TAIL_TOKENS,
    EnginePair,
    EnginePairSettings,
)

PROMPTS = [[7] * (2 * BLOCK_TOKENS + TAIL_TOKENS), [8] * (BLOCK_TOKENS + TAIL_TOKENS)]


class FakeNode:
    """Has every block on disk but those that an engine gave up; waits for none."""

    def __init__(self, given_up):
        self.blocks = 5
        self.given_up = given_up

    def blocks_on_disk(self):
        return self.blocks

    def wait_on_disk(self, blocks, within_s=60.0):
        if self.blocks < blocks:
            raise HoldfastError(f"not holding {blocks} blocks within {within_s:g} s")


@pytest.fixture
def save():
    """Save PROMPTS with an engine that gives blocks up so often; returns how often it was asked."""

    def run(times):
        bench, asked = object.__new__(EnginePair), []
        bench.disk_node, bench.behind = FakeNode(times), "behind"

        def ttft_s(engine, prompt, hint=None):
            assert engine == "behind"
            asked.append(prompt)
            if prompt is PROMPTS[-1]:
                bench.disk_node.given_up -= 1
                bench.disk_node.blocks = 8 if bench.disk_node.given_up < 0 else 7
            return 1.0, 0

        bench.ttft_s = ttft_s
        bench.save(PROMPTS)
        return len(asked) // len(PROMPTS)

    return run


def test_a_context_that_was_not_saved_is_computed_again(save):
    assert save(0) == 1
    assert save(1) == 2


def test_a_context_that_is_never_saved_ends_the_run_with_an_error(save):
    with pytest.raises(HoldfastError, match="not holding 8 blocks"):
        save(len(SAVED_S))


def test_long_contexts_get_fewer_rounds_and_short_ones_more():
    lengths = (128, 256, 512, 1024, 2048, 8192)
    for rounds, expected in ((3, [16, 6, 6, 4, 4, 4]), (7, [36, 14, 14, 8, 8, 4])):
        settings = EnginePairSettings("small", Path(), (), (), rounds, print)
        assert [settings.rounds_at(n) for n in lengths] == expected


class PlacedBench(EnginePair):
    """Notes what it would do; where contexts are saved is `disk_node`."""

    def __init__(self, disk_node="node"):
        self.node, self.disk_node, self.behind = Dropping(self, "node"), disk_node, "behind"
        self.disk_node = self.node if disk_node == "node" else Dropping(self, disk_node)
        self.did = []

    def text(self, tokens):
        return [tokens]

    def restart_node(self, place, plan):
        self.did.append(place)
        self.disk_node = Dropping(self, "target") if place == POOL else self.node

    def save(self, prompts):
        self.did.append(f"saved {len(prompts)} at {self.disk_node.name}")

    def ttft_s(self, engine, prompt, hint=None):
        self.did.append(f"asked for {prompt[0]}")
        return 1.0, 0


class Dropping:
    """A node or a target that notes when it drops everything."""

    process = SimpleNamespace(running=True)

    def __init__(self, bench, name):
        self.bench, self.name = bench, name

    def drop_all(self):
        self.bench.did.append(f"{self.name} emptied")

    def blocks_on_disk(self):
        return 0


SAVED = f"saved {len(PROMPTS)} at node"


@pytest.mark.parametrize(
    ("place", "before", "done"),
    [
        ("host", "node", ["disk", SAVED]),
        ("disk", "node", [SAVED, "disk"]),
        ("slow", "node", [SAVED, "slow"]),
        ("disk", "target", ["disk", SAVED, "disk"]),
        ("slow", "target", ["disk", SAVED, "slow"]),
    ],
)
def test_contexts_are_saved_and_the_node_restarted_as_their_place_needs(place, before, done):
    """A node that starts has nothing in memory; what is at a target is not on its disk."""
    bench = PlacedBench(before)
    bench.place_contexts(place, "best", PROMPTS)
    assert bench.did == done


def test_a_context_placed_in_a_pool_is_dropped_from_the_local_node():
    """The node, which forgets what it learnt when it ends, has met engine and target by then."""
    bench = PlacedBench()
    bench.place_contexts(POOL, "best", PROMPTS)
    met = [f"asked for {tokens}" for tokens in PROBE_TOKENS]
    saved = f"saved {len(PROMPTS) + len(PROBE_TOKENS)} at target"
    assert bench.did == [POOL, saved, "node emptied", *met]


def test_a_target_is_cleared_with_its_node():
    bench = PlacedBench("target")
    bench.probe = [1]
    bench.drop_contexts()
    assert bench.did == ["node emptied", "target emptied", "saved 1 at target"]


def test_a_disk_tier_is_probed_with_contexts_stored_on_it():
    bench, asked = object.__new__(EnginePair), []
    bench.behind, bench.text = "behind", lambda tokens: [tokens]
    bench.place_contexts = lambda place, plan, prompts: asked.append((place, plan, len(prompts)))
    bench.ttft_s = lambda engine, prompt: asked.append((engine, *prompt))
    bench.probe_tier("slow")
    assert asked[0] == ("slow", "best", len(asked) - 1)
    assert all(engine == "behind" for engine, *_ in asked[1:])


def test_a_token_of_a_pool_is_renewed_before_every_context(monkeypatch):
    """It lasts ten minutes; a round of long contexts took twelve, and was let in no more."""
    did = []
    asked = SimpleNamespace(
        answer=SimpleNamespace(ttft_s=0.5), tokens=SimpleNamespace(fetched_total=128)
    )
    monkeypatch.setattr(measuring, "ask", lambda *_: did.append("asked") or asked)
    bench = object.__new__(EnginePair)
    bench._cooldown = SimpleNamespace(wait_others=lambda engine: None)
    bench._pool = SimpleNamespace(renew_token=lambda: did.append("renewed"))
    engine = SimpleNamespace(reset_prefix_cache=lambda: None)
    assert [bench.ttft_s(engine, [1]) for _ in range(2)] == [(0.5, 128)] * 2
    assert did == ["renewed", "asked"] * 2
