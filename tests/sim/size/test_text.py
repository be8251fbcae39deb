"""What is said beside a proposal."""

import msgspec
import pytest

from holdfast.sim.size import of_users
from holdfast.sim.size.text import assumptions, figure_text, size_text


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


def test_sizes_are_written_with_three_digits():
    assert [size_text(n) for n in (3.2e14, 6.55e11, 2.5e7, 4.6e18)] == [
        "320 TB",
        "655 GB",
        "25 MB",
        "4,600 PB",
    ]


def test_sizes_are_rounded_before_their_unit_is_chosen():
    assert [size_text(n) for n in (9.994e11, 9.996e11, 9.996e8, 9.999e17)] == [
        "999 GB",
        "1 TB",
        "1 GB",
        "1,000 PB",
    ]


def test_large_figures_have_no_exponent():
    assert [figure_text(n) for n in (1.0, 1.206, 999.4, 999.6, 1234.0, 2e6)] == [
        "1",
        "1.21",
        "999",
        "1,000",
        "1,234",
        "2,000,000",
    ]
