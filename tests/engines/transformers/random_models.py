"""Small random models of each kind, and the oracle: a model that goes on from its own cache."""

from functools import cache

import torch
import transformers

torch.set_num_threads(1)  # so that small products do not wait for busy cores

VOCABULARY = 1_000
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 3, "max_position_embeddings": 4096,
}  # fmt: skip
_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]

CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 50, "layer_types": _WINDOWS, "query_pre_attn_scalar": 16},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 50}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4, "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "intermediate_size_mlp": 128, "num_local_experts": 2, "num_experts_per_tok": 1,
            "attention_chunk_size": 48, "no_rope_layer_interval": 4,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "sliding_window": 50, "layer_types": _WINDOWS, "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    ),
    "mla": (
        "DeepseekV2Config",
        {
            "moe_intermediate_size": 32, "num_key_value_heads": 4, "kv_lora_rank": 32,
            "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24,
            "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        },
    ),
}  # fmt: skip
"""Configuration class of transformers and its arguments, by name."""


@cache
def model_of(name):
    """Return a model; tests do not change it."""
    return new_model(name)


def new_model(name):
    kind, arguments = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**_SIZES | arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
    return model


def image_model():
    """Return a model of texts and images, whose positions are those of images, too (M-RoPE)."""
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY + 10, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4,
            },
        },
        vision_config={
            "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 1,
        },
        image_token_id=VOCABULARY, video_token_id=VOCABULARY + 1,
        vision_start_token_id=VOCABULARY + 2, vision_end_token_id=VOCABULARY + 3,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def image_prompt(side):
    """Return the inputs of a prompt with an image of `side` x `side` tokens."""
    patches, tokens = (2 * side) ** 2, side**2
    ids = torch.cat(
        [prompt_of(5, 40), torch.full((1, tokens), VOCABULARY), prompt_of(6, 20)], dim=1
    )
    generator = torch.Generator().manual_seed(side)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == VOCABULARY).int(),
        "pixel_values": torch.randn(patches, 16, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]]),
    }


def prompt_of(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, VOCABULARY, (1, tokens), generator=generator)


def own_cache(model, ids, tokens):
    """Return the model's own cache of the first tokens of a prompt."""
    found = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :tokens], past_key_values=found, use_cache=True)
    return found


def tail(model, ids, filled):
    """Return the logits of the tokens of a prompt that a cache does not hold."""
    with torch.no_grad():
        return model(ids[:, int(filled.get_seq_length()) :], past_key_values=filled).logits


def answer(model, ids, **more):
    """Generate four tokens; return them, and their scores."""
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
        eos_token_id=None, return_dict_in_generate=True, output_scores=True, **more,
    )  # fmt: skip
    return found.sequences, torch.stack(found.scores)
