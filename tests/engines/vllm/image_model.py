"""A small random model with an encoder of images, which vLLM runs on the CPU."""

from pathlib import Path

IMAGE_TOKEN = 999
IMAGE_TOKENS = 16
"""Tokens of a picture: 56 pixels a side, patches of 14."""


def make_image_model(folder: Path) -> Path:
    """Write the model into a new folder, with what vLLM reads beside its weights."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        image_size=56, patch_size=14, projection_dim=64,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        architectures=["LlavaForConditionalGeneration"],
    )
    torch.manual_seed(1)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(IMAGE_TOKEN)}
    tokenizer = Tokenizer(models.WordLevel(words | {"<image>": IMAGE_TOKEN}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2"
    )
    pictures = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    LlavaProcessor(
        pictures, fast, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    return folder
