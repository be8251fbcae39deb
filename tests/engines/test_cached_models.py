"""The table of cached models: one rule for its kinds, the same on every page and in all answers."""

from pathlib import Path

import pytest

from holdfast.cli.model_caching import kind_of_shape
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
