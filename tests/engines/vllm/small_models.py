"""Small random models of each kind, for the tests that start vLLM; vLLM gets token ids."""

VOCABULARY = 2_000
_TOKENS = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "max_position_embeddings": 4096,
}
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_HALF_WINDOWS = ["sliding_attention", "full_attention"] * 2
_ONE_FULL = ["sliding_attention"] * 3 + ["full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS = {
    "llama": ("LlamaConfig", _SIZES),
    "mla": (
        "DeepseekV2Config",
        {
            "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _SIZES | {"sliding_window": 256, "query_pre_attn_scalar": 64, "layer_types": _ONE_FULL},
    ),
    "gpt_oss": (
        "GptOssConfig",
        _SIZES | _EXPERTS | {"sliding_window": 128, "layer_types": _HALF_WINDOWS},
    ),
    "llama4": (
        "Llama4TextConfig",
        _SIZES | {
            "intermediate_size_mlp": 256, "num_local_experts": 4, "num_experts_per_tok": 1,
            "attention_chunk_size": 384, "no_rope_layer_interval": 4,  # divides no hit of the tests
        },
    ),
    "mistral": ("MistralConfig", _SIZES | {"sliding_window": 256}),
    "gemma4": (
        "Gemma4TextConfig",
        _SIZES | {
            "sliding_window": 256, "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 0, "layer_types": _ONE_FULL,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        _SIZES | {
            "num_attention_heads": 2, "num_key_value_heads": 1,
            "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_dim": 128,
            "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 256,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        _SIZES | {
            "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_value_heads": 2,
            "linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        _SIZES | {
            "num_hidden_layers": 2, "mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64,
            "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_chunk_size": 64, "mamba_expand": 2,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _SIZES | {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 4,
            "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1, "chunk_size": 64,
            "conv_kernel": 4, "expand": 2,
        },
    ),
}  # fmt: skip
"""Configuration class of transformers and its arguments, by name."""


MAMBA2 = {"max_num_batched_tokens": 192, "max_num_seqs": 4}
"""Options of vLLM for models with Mamba 2: on CPUs it fails for a chunk of two pages or more."""


def write_models(folder):
    """Write every model, with random weights in float32, to a folder of its own."""
    import torch
    import transformers

    for name, (kind, arguments) in CONFIGS.items():
        config = getattr(transformers, kind)(**_TOKENS, **arguments)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.1)
        model.save_pretrained(folder / name)
