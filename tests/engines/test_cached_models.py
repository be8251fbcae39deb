"""The table of cached models: one rule for its kinds, the same on every page and in all answers."""

import re
from pathlib import Path

import pytest

from holdfast.cli.model_caching import examine_model, kind_of_shape
from holdfast.engines.cached_models import (
    CHUNKS,
    FULL,
    MODEL_KINDS,
    OTHER,
    RECURRENT,
    SIZES,
    SPARSE,
    WINDOW_ONLY,
    WINDOWS,
    Caching,
    LayerKind,
    engine_table,
    full_table,
    kind_of,
    short_table,
)
from holdfast.sim.model.catalogue import known_models, load_model

ROOT = Path(__file__).resolve().parents[2]
FULL_LAYER, WINDOW, CHUNK = LayerKind("full", 8), LayerKind("window", 8), LayerKind("chunk", 8)
STATE, INDEX = LayerKind("recurrent", 0), LayerKind("sparse", 1)

SHIPPED = {
    "MiniMaxAI/MiniMax-M2": FULL,
    "Qwen/Qwen3-": FULL,
    "Qwen/Qwen3.5": RECURRENT,
    "XiaomiMiMo/MiMo": SIZES,
    "deepseek-ai/DeepSeek-V3": FULL,
    "deepseek-ai/DeepSeek-V3.2": SPARSE,
    "deepseek-ai/DeepSeek-V4": SPARSE,
    "google/gemma-4": SIZES,
    "meta-llama/Llama-4": CHUNKS,
    "meta-llama/Meta-Llama-3": FULL,
    "mistralai/Mixtral": FULL,
    "moonshotai/Kimi-K2": FULL,
    "moonshotai/Kimi-K3": RECURRENT,
    "nvidia/NVIDIA-Nemotron-3": RECURRENT,
    "openai/gpt-oss": WINDOWS,
    "zai-org/GLM-5": SPARSE,
}
"""Kinds of the shipped models, by how their names begin; the longest beginning counts."""


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([FULL_LAYER], FULL),
        ([WINDOW, FULL_LAYER], WINDOWS),
        ([CHUNK, FULL_LAYER], CHUNKS),
        ([WINDOW, CHUNK, FULL_LAYER], CHUNKS),
        ([WINDOW], WINDOW_ONLY),
        ([CHUNK], WINDOW_ONLY),
        ([WINDOW, LayerKind("full", 16)], SIZES),
        ([LayerKind("full", 16), FULL_LAYER], SIZES),
        ([STATE, FULL_LAYER], RECURRENT),
        ([STATE, INDEX, WINDOW], RECURRENT),
        ([STATE], RECURRENT),
        ([INDEX, FULL_LAYER], SPARSE),
        ([LayerKind("other", 8), FULL_LAYER], OTHER),
        ([], OTHER),
    ],
)
def test_the_kind_of_a_model_follows_from_its_layers(layers, kind):
    assert kind_of(layers) is kind


@pytest.mark.parametrize("name", known_models())
def test_shipped_models_have_the_kind_that_the_table_says(name):
    expected = SHIPPED[max((start for start in SHIPPED if name.startswith(start)), key=len)]
    assert kind_of_shape(load_model(name)) is expected


def test_the_readme_and_the_how_to_show_the_table_of_cached_models():
    assert short_table() in (ROOT / "README.md").read_text(), short_table()
    assert full_table() in (ROOT / "docs" / "how-to" / "vllm.md").read_text(), full_table()
    assert {kind.caching for kind in MODEL_KINDS} == set(Caching)
    assert all(bool(kind.since) == (kind.caching != Caching.NOT_YET) for kind in MODEL_KINDS)


def test_the_reference_shows_the_table_of_engines():
    page = (ROOT / "docs" / "reference" / "engines.md").read_text()
    assert engine_table() in page, engine_table()


def test_each_feature_of_vllm_names_a_test_that_exists_or_a_reason():
    page = (ROOT / "docs" / "reference" / "engines.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / "engines" / "vllm" / file).read_text()


def test_doctor_says_of_a_model_what_the_table_says():
    said = examine_model("openai/gpt-oss-20b").why
    assert "the vLLM connector caches this model" in said
    assert "holdfast.transformers caches it" in said
    assert f"SGLang: {WINDOWS.sglang}" in said
    assert f"LMCache: {WINDOWS.lmcache}" in said
