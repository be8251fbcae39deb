"""Small random models of each kind, for the tests that start vLLM; vLLM gets token ids."""

import json

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
_FOR_STAGES = ["sliding_attention", "full_attention", "sliding_attention"] * 2
"""Each of two pipeline stages has layers of both kinds, and windows in two of vLLM's page lists."""

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
    "gemma3_for_stages": (
        "Gemma3TextConfig",
        _SIZES | {
            "num_hidden_layers": 6, "sliding_window": 256, "query_pre_attn_scalar": 64,
            "layer_types": _FOR_STAGES,
        },
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
    "mimo": (
        "Qwen2Config", {
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _SIZES | {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
}  # fmt: skip
"""Configuration class of transformers and its arguments, by name."""

MTP = {
    "mimo": (
        "model.mtp_layers.0", "input_proj", ("token_layernorm", "hidden_layernorm",
        "final_layernorm"), {"architectures": ["MiMoForCausalLM"]},
    ),
    "glm4_moe": ("model.layers.4", "eh_proj", ("enorm", "hnorm", "shared_head.norm"), {}),
}  # fmt: skip
"""Models with a module that predicts one token more, and what transformers does not know of it:
the module's name in the checkpoint, its projection, its norms, and settings of the model.
"""


MAMBA2 = {"max_num_batched_tokens": 192, "max_num_seqs": 4}
"""Options of vLLM for models with Mamba 2: on CPUs it fails for a chunk of two pages or more."""


_DRAFT = _SIZES | {"num_hidden_layers": 1}

DRAFTS = {
    "draft_model": ("LlamaConfig", "LlamaForCausalLM", _DRAFT | {"num_key_value_heads": 1}),
    "eagle": ("LlamaConfig", "LlamaForCausalLM", _DRAFT),
    "eagle3": (
        "LlamaConfig",
        "LlamaForCausalLMEagle3",
        _DRAFT | {"draft_vocab_size": VOCABULARY, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    ),
}
"""Draft models for `llama`: configuration class, architecture and arguments, by vLLM's method."""


def latent_dtype():
    """Return the type in which vLLM computes the model `mla`: with AMX it refuses float32."""
    import torch

    return "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


def write_models(folder):
    """Write every model, with random weights in float32, to a folder of its own."""
    for name in CONFIGS:
        write_model(folder, name)


def write_model(folder, name):
    import torch
    import transformers

    kind, arguments = CONFIGS[name]
    config = getattr(transformers, kind)(**_TOKENS, **arguments)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder / name)
    if name in MTP:
        _add_mtp_module(folder / name, *MTP[name], config)


def _add_mtp_module(folder, module, projection, norms, settings, config):
    """Add a module with a layer like the model's last one, and random weights."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors, size = load_file(folder / "model.safetensors"), config.hidden_size
    last = f"model.layers.{config.num_hidden_layers - 1}."
    added = {
        f"{module}.{name.removeprefix(last)}": torch.randn_like(value) * 0.1
        if value.dim() > 1
        else value.clone()
        for name, value in tensors.items()
        if name.startswith(last)
    }
    added |= {f"{module}.{name}.weight": torch.ones(size) for name in norms}
    added[f"{module}.{projection}.weight"] = torch.randn(size, 2 * size) * 0.1
    added[f"{module}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    added[f"{module}.shared_head.head.weight"] = torch.randn(VOCABULARY, size) * 0.1
    if settings:  # MiMo's module has the embedding and the head of the model
        del added[f"{module}.embed_tokens.weight"], added[f"{module}.shared_head.head.weight"]
    save_file(tensors | added, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text())
    written |= settings | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(written))


def write_draft(folder, method, seed=0):
    """Write a draft model for `llama`: random weights in float32, named as vLLM names them."""
    import torch
    import transformers
    from safetensors.torch import save_file

    kind, architecture, arguments = DRAFTS[method]
    config = getattr(transformers, kind)(
        **_TOKENS, **arguments, architectures=[architecture], tie_word_embeddings=False,
        dtype="float32",
    )  # fmt: skip
    torch.manual_seed(seed)
    tensors = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    size = config.hidden_size
    if method != "draft_model":
        del tensors["lm_head.weight"]
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
        del tensors["norm.weight"]
    if method == "eagle":
        del tensors["layers.0.input_layernorm.weight"]  # an EAGLE head has none
        tensors["fc.weight"] = torch.empty(size, 2 * size)
    if method == "eagle3":
        tensors = {name.replace("layers.0", "midlayer"): each for name, each in tensors.items()}
        for name in "qkv":
            each = f"midlayer.self_attn.{name}_proj.weight"
            tensors[each] = torch.empty(tensors[each].shape[0], 2 * size)
        tensors["midlayer.hidden_norm.weight"] = torch.ones(size)
        tensors["norm.weight"] = torch.ones(size)
        tensors["fc.weight"] = torch.empty(size, 3 * size)
        tensors["lm_head.weight"] = torch.empty(VOCABULARY, size)
    for value in tensors.values():
        if value.dim() > 1:
            value.normal_(0.0, 0.1)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
