"""What vLLM tells the connector about a small engine: configuration, groups and tensors."""

from types import SimpleNamespace

import torch

from holdfast.engines.vllm.options import ConnectorSettings

SETTING = ConnectorSettings("", "default", 0, "pinned", 0.05, 5.0, saves=True)
PAGES, HEADS, TOKENS, HEAD_SIZE = 10, 4, 32, 32


class FullAttentionSpec(SimpleNamespace):
    pass


class Configuration(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


def spec_of(**changes):
    fields = {
        "block_size": TOKENS,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
        "page_size_bytes": HEADS * TOKENS * 2 * HEAD_SIZE * 2,
        "unpadded_page_size_bytes": HEADS * TOKENS * 2 * HEAD_SIZE * 2,
        "kv_quant_mode": SimpleNamespace(name="NONE"),
    }
    return FullAttentionSpec(**(fields | changes))


def config_of(**changes):
    hf = Configuration(rope_theta=1e4, max_position_embeddings=4096, hidden_size=64)
    fields = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
        "speculative_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "device_config": SimpleNamespace(device_type="cpu"),
        "load_config": SimpleNamespace(load_format="auto"),
        "model_config": SimpleNamespace(
            model="/models/m", revision=None, hf_config=hf, hf_text_config=hf,
            dtype=torch.bfloat16, quantization=None, disable_sliding_window=False,
        ),
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def groups_of(*specs):
    groups = [SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def tensors_of(shape=(PAGES, HEADS, TOKENS, 2 * HEAD_SIZE), dtype=torch.bfloat16):
    return {name: torch.zeros(shape, dtype=dtype) for name in ("a", "b")}
