"""Engines that go on behind each other's contexts are compared with what they compute alone."""

import pytest

pytest.importorskip("transformers")

import holdfast
from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast_bench.harness.model import SHAPES, make
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.transformers_engine import TransformersEngine
from holdfast_bench.scenarios.engine_comparison import ComparedEngine, compare_pairs


@pytest.fixture
def node(tmp_path):
    one = NodeUnderTest(tmp_path / "node", 64 * MIB, 64 * MIB, settings={"plan": "held"})
    yield one
    one.process.stop()


def compared(node, writer_dtype):
    """Compare two engines of one model over one prompt."""
    with holdfast.open(node.address) as store:
        alone = TransformersEngine(make("tiny"), "float32")
        pairs = {
            name: ComparedEngine(TransformersEngine(make("tiny"), dtype, store).ask, alone.ask)
            for name, dtype in (("writer", writer_dtype), ("reader", "float32"))
        }
        return compare_pairs(node, pairs, SHAPES["tiny"].vocabulary, 1, lambda _: None)


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
