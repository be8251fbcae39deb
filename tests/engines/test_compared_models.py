"""Engines share contexts of models that were compared; otherwise each has its own."""

import re
from pathlib import Path

import pytest

from holdfast.client.model_meaning import ANY
from holdfast.engines.compared_models import COMPARED_ROPES, COMPARED_TYPES, computed_by

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md"


@pytest.mark.parametrize(
    ("config", "overrides", "shared"),
    [
        ({"model_type": "llama"}, {}, {"vllm", "transformers", "sglang"}),
        ({"model_type": "gpt_oss"}, {}, {"vllm", "transformers"}),
        ({"model_type": "mistral", "sliding_window": None}, {}, {"vllm", "transformers", "sglang"}),
        ({"model_type": "mistral", "sliding_window": 4096}, {}, {"vllm", "transformers"}),
        ({"model_type": "mistral"}, {}, {"vllm", "transformers"}),
        ({"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False}, {},
         {"vllm", "transformers", "sglang"}),
        ({"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False},
         {"use_sliding_window": True}, {"vllm", "transformers"}),
        ({"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"]}, {},
         {"vllm", "transformers"}),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, {},
         {"vllm", "transformers"}),
        ({"model_type": "llama4"}, {}, set()),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}}, {}, set()),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}, {},
         {"vllm", "transformers"}),
        ({"model_type": "llama"}, {"rope_parameters": {"rope_type": "longrope"}}, set()),
        ({"model_type": "granite", "rope_scaling": {"rope_type": "linear"}}, {},
         {"vllm", "transformers", "sglang"}),
        ({"model_type": "mixtral", "rope_parameters": {"rope_type": "default"}}, {},
         {"vllm", "transformers", "sglang"}),
        ({"model_type": "mixtral", "rope_scaling": {"rope_type": "linear"}}, {},
         {"vllm", "transformers"}),
        ({"model_type": "mixtral"}, {"rope_scaling": {"type": "linear"}},
         {"vllm", "transformers"}),
        ({}, {}, set()),
    ],
)  # fmt: skip
def test_an_engine_shares_what_was_compared(config, overrides, shared):
    engines = ("vllm", "transformers", "sglang", "vllm with transformers")
    found = {engine: computed_by(engine, config, overrides) for engine in engines}
    assert found == {engine: ANY if engine in shared else engine for engine in engines}


def test_the_page_names_the_types_of_models():
    text = PAGE.read_text()
    [named] = re.findall(r"types of models that a test has compared: (.*?); SGLang", text)
    assert set(re.findall(r"`(\w+)`", named)) == {*COMPARED_TYPES}
    [named] = re.findall(r"; SGLang shares those of (.*?), if they have no sliding windows", text)
    with_sglang = {kind for kind, engines in COMPARED_TYPES.items() if "sglang" in engines}
    assert set(re.findall(r"`(\w+)`", named)) == with_sglang


def test_every_compared_engine_knows_the_plain_rope():
    engines = {engine for engines in COMPARED_TYPES.values() for engine in engines}
    assert engines == COMPARED_ROPES["default"]
