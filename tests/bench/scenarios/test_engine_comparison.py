"""Engines that go on behind each other's contexts are compared with what they compute alone."""

import random

import pytest

pytest.importorskip("transformers")

import holdfast
from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast_bench.harness.model import SHAPES, make
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.transformers_engine import TransformersEngine
from holdfast_bench.scenarios.engine_comparison import ComparedEngine, compare_engines


@pytest.fixture
def node(tmp_path):
    one = NodeUnderTest(tmp_path / "node", 64 * MIB, 64 * MIB, settings={"plan": "held"})
    yield one
    one.process.stop()


_WORDS = random.Random(1)
PROMPT = [_WORDS.randrange(300, SHAPES["tiny"].vocabulary) for _ in range(434)]


def compared(node, writer_dtype):
    """Compare two engines of one model over one prompt."""
    with holdfast.open(node.address) as store:
        alone = TransformersEngine(make("tiny"), "float32")
        engines = {
            name: ComparedEngine(
                TransformersEngine(make("tiny"), dtype, store).ask, alone.ask, lambda: None
            )
            for name, dtype in (("writer", writer_dtype), ("reader", "float32"))
        }
        return compare_engines(node, engines, [PROMPT], lambda _: None)


def test_two_engines_of_one_model_answer_behind_each_other_as_alone(node):
    found = compared(node, "float32")
    assert [(each.writer, each.reader) for each in found] == [
        ("writer", "reader"), ("reader", "writer"),
    ]  # fmt: skip
    assert all(each.equal == [True] for each in found)
    assert all(each.differences[0] < 1e-3 for each in found)
    assert all(each.between == [0.0] for each in found)


def test_a_context_that_is_not_fetched_is_no_comparison(node):
    with pytest.raises(HoldfastError, match="reader fetched 0 tokens of 384 that writer wrote"):
        compared(node, "bfloat16")


def test_a_writer_that_fetches_the_context_is_no_comparison(node):
    with holdfast.open(node.address) as store:
        engine = TransformersEngine(make("tiny"), "float32", store)

        def ask_twice(prompt, max_tokens):
            engine.ask(prompt, max_tokens)
            return engine.ask(prompt, max_tokens)

        alone = TransformersEngine(make("tiny"), "float32").ask
        engines = {"one": ComparedEngine(ask_twice, alone, lambda: None)}
        with pytest.raises(HoldfastError, match="one fetched a context that it was to write"):
            compare_engines(node, engines, [PROMPT], lambda _: None)
