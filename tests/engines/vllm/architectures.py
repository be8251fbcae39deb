"""Small models of many architectures whose layers all attend fully, with random weights."""

VOCABULARY = 1_000
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 3, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "gemma": ("GemmaConfig", {}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "cohere": ("CohereConfig", {}),
    "glm4": ("Glm4Config", {}),
    "granite": ("GraniteConfig", {}),
    "smollm3": ("SmolLM3Config", {}),
    "ernie4_5": ("Ernie4_5Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {}),
}
"""Configuration classes of transformers and their arguments, by type of model."""


def digest_of(name):
    """Return a name for the weights of a type if transformers cannot compare them with the files.

    It keeps the weights of experts in other tensors.
    """
    experts = {"num_experts", "num_local_experts"} & CONFIGS[name][1].keys()
    return name if experts else ""


def write_models(folder):
    """Write a model of each type into a folder of its name, with weights from a fixed seed."""
    import torch
    import transformers

    for name, (kind, arguments) in CONFIGS.items():
        config = getattr(transformers, kind)(**SIZES | arguments)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.1)
        model.save_pretrained(folder / name)
