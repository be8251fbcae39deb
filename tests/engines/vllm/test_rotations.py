"""vLLM and transformers rotate keys alike, for each kind of rope whose contexts they share."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import get_rope  # noqa: E402

from holdfast.engines.compared_models import COMPARED_ROPES  # noqa: E402

HEAD, LENGTH = 64, 4096
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
SETTINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn of gpt-oss": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn with a factor of attention": YARN | {"attention_factor": 1.3},
    "yarn with magnitudes": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn with one magnitude": YARN | {"mscale": 0.7},
    "yarn with other limits": YARN | {"beta_fast": 20, "beta_slow": 2},
}  # fmt: skip


def test_every_shared_kind_of_rope_is_compared():
    assert {settings["rope_type"] for settings in SETTINGS.values()} == {*COMPARED_ROPES}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_both_compute_the_same_rotations(settings):
    settings = settings | {"rope_theta": 1e4}
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD, num_attention_heads=4, head_dim=HEAD, rope_parameters=settings,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.arange(LENGTH)
    cos, sin = theirs(torch.zeros(1, 1, HEAD), positions[None])
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(HEAD, LENGTH, is_neox_style=True, rope_parameters=dict(settings),
                        dtype=torch.float32)  # fmt: skip
    own_cos, own_sin = rope.cos_sin_cache[positions].chunk(2, dim=-1)
    half = HEAD // 2
    assert (cos[0, :, :half] - own_cos).abs().max() < 1e-4
    assert (sin[0, :, :half] - own_sin).abs().max() < 1e-4


def test_the_kinds_are_those_of_this_version_of_transformers():
    assert {*COMPARED_ROPES} - {"default"} <= {*ROPE_INIT_FUNCTIONS}
