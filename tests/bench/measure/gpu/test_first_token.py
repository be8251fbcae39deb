"""The decoder of the bench, and the first token of fetched prompts, at toy sizes."""

import pytest

torch = pytest.importorskip("torch")

from holdfast.errors import HoldfastError  # noqa: E402
from holdfast_bench.measure.gpu import first_token  # noqa: E402
from holdfast_bench.measure.gpu.decoder import Decoder  # noqa: E402
from holdfast_bench.measure.gpu.paged_engine import PagedEngine  # noqa: E402
from holdfast_bench.measure.gpu.shapes import DECODERS, LLAMA_8B, TOY_DECODER  # noqa: E402

GIB = 1 << 30


@pytest.fixture
def decoder():
    return Decoder(TOY_DECODER, 2, "cpu")


def test_a_token_after_cached_ones_is_that_of_the_whole_prompt(decoder):
    tokens = decoder.tokens(100)
    whole = decoder.logits(tokens)
    decoder.logits(tokens[:99])
    assert torch.allclose(decoder.logits(tokens[99:], 99), whole, atol=0.1)
    other = decoder.tokens(100)
    assert not torch.allclose(decoder.logits(other), whole, atol=0.1)


def test_the_feed_forward_part_is_the_same_in_pieces(decoder, monkeypatch):
    tokens = decoder.tokens(64)
    whole = decoder.logits(tokens)
    monkeypatch.setattr("holdfast_bench.measure.gpu.decoder.MLP_TOKENS", 16)
    assert torch.allclose(decoder.logits(tokens), whole, atol=0.1)


def test_only_one_token_may_follow_cached_ones(decoder):
    with pytest.raises(ValueError, match="2 tokens after 10 cached ones"):
        decoder.logits(decoder.tokens(2), 10)


def test_decoders_have_the_parameters_of_the_published_models():
    def weights(shape):
        heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_size
        layer = shape.hidden * (heads + 3 * shape.intermediate)
        return shape.layers * layer + 2 * shape.vocabulary * shape.hidden

    sizes = {shape.model: weights(shape) / 1e9 for shape in DECODERS}
    assert sizes == {
        "llama-3.1-8b": pytest.approx(8.03, abs=0.01),
        "llama-3.1-70b-tp8": pytest.approx(70.55 / 8, abs=0.2),
    }
    assert DECODERS[0].pages == LLAMA_8B
    assert DECODERS[0].pages.block_bytes * 1024 == 16 * GIB


def test_first_tokens_come_from_every_source(measured):
    found = measured(first_token)
    sources = ("recomputed", "host", "disk", "disk.sealed")
    assert list(found) == [
        f"gpu.first_token.toy.{tokens}.{source}" for source in sources for tokens in (128, 256)
    ]
    assert all(row.value > 0 for row in found.values())
    assert all("gain" in row.more for row in found.values() if "recomputed" not in row.what)


def test_other_logits_after_a_fetch_are_an_error(measured, monkeypatch):
    monkeypatch.setattr(PagedEngine, "fetch", lambda *_: {"host": 1})
    with pytest.raises(HoldfastError, match="other logits"):
        measured(first_token)


def test_lengths_for_which_no_time_is_left_are_named(measured):
    found = measured(first_token, until_s=0.0)
    assert {what: row.more["why"] for what, row in found.items()} == {
        "gpu.first_token.toy.128.recomputed": "no time was left",
        "gpu.first_token.toy.256.recomputed": "no time was left",
    }


def test_short_prompts_of_all_models_come_before_the_longest(measured):
    order = list(measured(first_token, until_s=0.0, rehearse=False))
    assert order == [
        f"gpu.first_token.{shape.model}.{tokens}.recomputed"
        for group in first_token.LENGTHS
        for shape in DECODERS
        for tokens in group
    ]
