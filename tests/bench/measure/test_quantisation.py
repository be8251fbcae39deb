"""The gate on a small trained model: int8 passes; int6, fp8 and int4 by token do not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from holdfast.blocks.layout import HeadState, PortableLayout
from holdfast.codec.gate import excesses
from holdfast.errors import ConfigError
from holdfast_bench.measure.quantisation import (
    Int8Coder,
    JudgedModel,
    Lengths,
    comparisons,
    difference,
    judge,
    positions,
    read_prompts,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "data" / "trained-model"
TEXT = FOLDER / "held_out.txt"
LENGTHS = Lengths(prompts=8, coded=512, judged=128)
LAYOUT = PortableLayout("bfloat16", 128, (HeadState(2, 32, 32),) * 4)


@pytest.fixture(scope="module")
def model():
    return JudgedModel(FOLDER, "", "float32", "cpu")


@pytest.fixture(scope="module")
def judged(model):
    coder = Int8Coder(LAYOUT)
    coders = {"int8": coder, "exact": lambda cache: cache, **comparisons(128)}
    control, coded = judge(model, read_prompts(TEXT, model, LENGTHS), LENGTHS, coders)
    return coder, control, coded


def test_int8_passes_the_gate(judged):
    coder, control, coded = judged
    assert excesses(coded["int8"], control) == []
    assert (coder.blocks, coder.exact_blocks) == (32, 0)


@pytest.mark.parametrize("name", sorted(comparisons(128)))
def test_a_coarser_coding_fails_the_gate(judged, name):
    _, control, coded = judged
    assert excesses(coded[name], control)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """The model with wide channels: keys of two rotary pairs are 16 times larger.

    Queries of these pairs are 16 times smaller, so the model computes the same.
    """
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    dim, half, pairs, factor = model.config.head_dim, model.config.head_dim // 2, 2, 16.0
    chosen = [*range(half - pairs, half), *range(dim - pairs, dim)]
    with torch.no_grad():
        for layer in model.model.layers:
            for weight, scale in (
                (layer.self_attn.k_proj.weight, factor),
                (layer.self_attn.q_proj.weight, 1 / factor),
            ):
                weight.view(-1, dim, weight.shape[1])[:, chosen] *= scale
    model.save_pretrained(folder)
    return JudgedModel(folder, "", "float32", "cpu")


def keys_by_token(cache):
    """Int8 whose keys have a scale for each token, which wide channels spoil for the others."""

    def code(x):
        step = (x.float().abs().amax(2, keepdim=True) / 127).half().float().clamp(min=2**-24)
        return ((x.float() / step).round().clamp(-127, 127) * step).to(x.dtype)

    return [(code(keys), code(values)) for keys, values in cache]


def test_with_wide_channels_int8_stays_near_the_noise_and_keys_coded_by_token_do_not(wide_model):
    lengths = LENGTHS._replace(prompts=3)
    prompts = read_prompts(TEXT, wide_model, lengths)
    coders = {"int8": Int8Coder(LAYOUT), "by token": keys_by_token}
    control, coded = judge(wide_model, prompts, lengths, coders)
    assert coded["int8"].kl < 2 * control.kl
    assert coded["by token"].kl > 1.5 * coded["int8"].kl


def test_an_unchanged_cache_changes_nothing(judged):
    exact = judged[2]["exact"]
    assert (exact.kl, exact.kl_p99, exact.same_top, exact.nats_lost) == (0.0, 0.0, 1.0, 0.0)


def test_the_layout_is_that_of_the_model(model):
    cache = model.context(np.arange(16))
    assert model.layout(cache, 128) == LAYOUT


def test_the_coder_applies_the_codec_to_each_block_alone(model):
    cache = model.context(read_prompts(TEXT, model, LENGTHS)[0][:256])
    kept = Int8Coder(LAYOUT)(cache)
    assert Int8Coder(LAYOUT)(kept)[0][0].equal(kept[0][0])
    first = Int8Coder(LAYOUT)([(k[:, :128], v[:, :128]) for k, v in cache])
    for (k, v), (k1, v1), (exact, _) in zip(kept, first, cache, strict=True):
        assert k[:, :128].equal(k1)
        assert v[:, :128].equal(v1)
        assert not k.equal(exact)
        step = exact[:, :128].float().abs().amax(1, keepdim=True) / 254
        assert ((k1.float() - exact[:, :128].float()).abs() <= step * 1.1 + 2**-9 * 8).all()


def test_a_block_with_a_value_that_is_not_finite_stays_exact_and_is_counted(model):
    cache = model.context(np.arange(256) % 1000)
    cache[1][0][0, 200, 3] = torch.inf
    coder = Int8Coder(LAYOUT)
    kept = coder(cache)
    assert (coder.blocks, coder.exact_blocks) == (2, 1)
    assert kept[0][0][:, 128:].equal(cache[0][0][:, 128:])
    assert not kept[0][0][:, :128].equal(cache[0][0][:, :128])


def test_figures_are_over_all_positions_of_all_prompts():
    flat, sharp = torch.zeros(3, 2), torch.tensor([[0.0, 0.0], [0.0, 0.0], [2.0, -2.0]])
    text = np.array([0, 1, 0])
    found = [positions(flat, flat, text), positions(sharp, flat, text)]
    total = difference(found)
    p = np.exp(2) / (np.exp(2) + np.exp(-2))
    kl = p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p))
    assert total.kl == pytest.approx(kl / 6)
    assert total.kl_p99 == pytest.approx(np.quantile([0, 0, 0, 0, 0, kl], 0.99))
    assert total.nats_lost == pytest.approx(np.log(2 * p) / 6)
    assert total.same_top == 1.0
    assert (total.score, total.score_error) == (pytest.approx(2 / 3), 0.0)
    worse = difference([*found, positions(flat, flat, np.array([1, 1, 1]))])
    assert worse.score == pytest.approx(4 / 9)
    assert worse.score_error == pytest.approx(2 / 9)


def test_prompts_are_read_from_lines_of_json_and_short_ones_are_left_out(tmp_path, model):
    lengths = Lengths(2, 4, 2)
    long = "def read(self): return self.data " * 3
    lines = [long, {"prompt": "x " + long}, {"text": "y " + long}, {"other": long}, "short", 7]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_prompts(file, model, lengths)
    assert [list(each) for each in found] == [
        list(model.tokens(long)[:7]), list(model.tokens("x " + long)[:7]),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="has 3 prompts of 7 tokens, and 4 are needed; add long"):
        read_prompts(file, model, lengths._replace(prompts=4))


def test_a_line_of_json_may_have_separators_of_unicode_and_a_damaged_one_is_named(tmp_path, model):
    file = tmp_path / "prompts.jsonl"
    text = "def read(self):\u2028 return self.data\x85 " * 3
    file.write_text(json.dumps(text, ensure_ascii=False) + "\n", encoding="utf-8")
    [found] = read_prompts(file, model, Lengths(1, 4, 2))
    assert list(found) == list(model.tokens(text)[:7])
    file.write_text(json.dumps(text) + "\n{")
    with pytest.raises(ConfigError, match=r"line 2 is not JSON: .*; correct it"):
        read_prompts(file, model, Lengths(1, 4, 2))


def test_prompts_of_one_text_do_not_overlap(model):
    found = read_prompts(TEXT, model, LENGTHS)
    assert [len(each) for each in found] == [641] * 8
    with pytest.raises(ConfigError, match="prompts of 641 tokens, and 10000 are needed"):
        read_prompts(TEXT, model, LENGTHS._replace(prompts=10_000))


@pytest.mark.parametrize("content", [b"\xff", b"{"])
def test_a_file_of_prompts_that_cannot_be_read_is_refused(tmp_path, model, content):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--prompts .*prompts\.jsonl: "):
        read_prompts(file, model, LENGTHS)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl", model, LENGTHS)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--model .*: has no config\.json"):
        JudgedModel(tmp_path, "", "float32", "cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--model .*: cannot be loaded"):
        JudgedModel(tmp_path, "", "float32", "cpu")


def test_the_control_of_other_batches_has_one_copy_of_the_model(monkeypatch):
    import transformers

    loads = []
    load = transformers.AutoModelForCausalLM.from_pretrained

    def counted(*args, **options):
        loads.append(options)
        return load(*args, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", counted)
    JudgedModel(FOLDER, "", "batch", "cpu")
    assert len(loads) == 1


def test_a_control_that_cannot_differ_is_refused():
    with pytest.raises(ConfigError, match="the model is in fp32 itself"):
        JudgedModel(FOLDER, "float32", "float32", "cpu")


def test_a_model_with_state_other_than_keys_and_values_of_all_tokens_is_refused(model):
    cache = type("Cache", (), {"layers": [type("SlidingLayer", (), {})()]})()
    from holdfast_bench.measure import quantisation

    with pytest.raises(ConfigError, match="layer 0 keeps SlidingLayer, not keys and values"):
        quantisation._layers(cache, 16)
