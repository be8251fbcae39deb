"""What is said beside a proposal."""

import msgspec
import pytest

from holdfast.sim.size import of_users
from holdfast.sim.size.text import assumptions


def test_what_the_gpus_hold_themselves_is_told(asked):
    question = asked(of_users(10, 1000, 10, 60.0))
    room = 8 * 141e9 * 0.9 - question.shape.weights_bytes
    assert question.device_tokens == pytest.approx(room / 327_680)
    assert any(f"{question.device_tokens:,.0f} tokens fit" in s for s in assumptions(question))


def test_fetching_a_windowed_model_has_a_break_even_too(asked):
    windowed = asked(of_users(100, 4000, 100, 60.0), "gpt-oss-20b")
    layers = tuple(p for p in windowed.shape.attention if p.kind == "window")
    shape = msgspec.structs.replace(windowed.shape, attention=layers)
    lines = assumptions(msgspec.structs.replace(windowed, shape=shape))
    seconds = shape.prefill_flop(4000) / windowed.flop_per_s
    even = shape.window_bytes() / seconds / 1e9
    assert any(f"above {even:.3g} GB/s" in line for line in lines)
