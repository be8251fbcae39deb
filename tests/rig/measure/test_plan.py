"""Plans are measured on contexts that really are where they are said to be."""

from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.measure.plan import SAVED_S, TAIL_TOKENS, Bench, Course

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

        def ttft_s(engine, prompt):
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


def test_long_contexts_get_fewer_rounds():
    course = Course("small", Path(), (), (), 5, print)
    assert [course.rounds_at(tokens) for tokens in (128, 2048, 4096, 8192)] == [5, 5, 3, 3]
