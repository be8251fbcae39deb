"""A small random model with an encoder of audio, which vLLM runs on the CPU."""

from pathlib import Path

AUDIO_TOKEN = 999
BEGIN, END = 997, 998
RATE = 16_000
SOUND_TOKENS = 25
"""Tokens of a second of sound."""


def make_audio_model(folder: Path) -> Path:
    """Write the model into a new folder, with the names of weights that vLLM expects."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    encoder = Qwen2AudioEncoderConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=128,
        num_mel_bins=16, max_source_positions=1500,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
    )  # fmt: skip
    config = Qwen2AudioConfig(
        audio_config=encoder.to_dict(),
        text_config=text.to_dict(),
        audio_token_index=AUDIO_TOKEN,
        architectures=["Qwen2AudioForConditionalGeneration"],
    )
    torch.manual_seed(1)
    model = Qwen2AudioForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({_vllm_name(name): each for name, each in load_file(file).items()}, file)
    words = {f"w{number}": number for number in range(BEGIN)}
    special = {"<|audio_bos|>": BEGIN, "<|audio_eos|>": END, "<|AUDIO|>": AUDIO_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(words | special, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2"
    )
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16), fast).save_pretrained(folder)
    return folder


def _vllm_name(name: str) -> str:
    parts = name.replace("language_model.model.model.", "language_model.model.")
    return parts.removeprefix("model.") if parts.startswith("model.audio") else parts
