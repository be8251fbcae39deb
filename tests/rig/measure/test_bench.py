"""Contexts are saved until the node has them, and put where they are said to be."""

from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.measure.bench import SAVED_S, TAIL_TOKENS, Bench, Course

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
        bench, asked = object.__new__(Bench), []
        bench.node, bench.behind = FakeNode(times), "behind"

        def ttft_s(engine, prompt, hint=None):
            assert engine == "behind"
            asked.append(prompt)
            if prompt is PROMPTS[-1]:
                bench.node.given_up -= 1
                bench.node.blocks = 8 if bench.node.given_up < 0 else 7
            return 1.0, 0

        bench.ttft_s = ttft_s
        bench.save(PROMPTS)
        return len(asked) // len(PROMPTS)

    return run


def test_contexts_that_were_given_up_are_computed_again(save):
    assert save(0) == 1
    assert save(1) == 2


def test_contexts_that_are_given_up_every_time_end_the_run(save):
    with pytest.raises(HoldfastError, match="not holding 8 blocks"):
        save(len(SAVED_S))


def test_long_contexts_get_fewer_rounds_and_short_ones_more():
    lengths = (128, 256, 512, 1024, 2048, 8192)
    for rounds, expected in ((3, [16, 6, 6, 4, 4, 4]), (7, [36, 14, 14, 8, 8, 4])):
        course = Course("small", Path(), (), (), rounds, print)
        assert [course.rounds_at(n) for n in lengths] == expected


@pytest.mark.parametrize(
    ("place", "done"),
    [("host", ["disk", "saved"]), ("disk", ["saved", "disk"]), ("slow", ["saved", "slow"])],
)
def test_what_is_in_memory_was_saved_after_the_start_and_all_else_before(place, done):
    """A node that starts has nothing in memory."""
    bench, did = object.__new__(Bench), []
    bench.move = lambda place, plan: did.append(place)
    bench.save = lambda prompts: did.append("saved")
    bench.have(place, "best", PROMPTS)
    assert did == done


def test_a_disk_is_met_with_contexts_that_lie_on_it():
    bench, asked = object.__new__(Bench), []
    bench.behind, bench.text = "behind", lambda tokens: [tokens]
    bench.have = lambda place, plan, prompts: asked.append((place, plan, len(prompts)))
    bench.ttft_s = lambda engine, prompt: asked.append((engine, *prompt))
    bench.meet("slow")
    assert asked[0] == ("slow", "best", len(asked) - 1)
    assert all(engine == "behind" for engine, *_ in asked[1:])
