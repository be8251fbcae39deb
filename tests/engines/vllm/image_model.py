"""A small random model with an encoder of images, which vLLM runs on the CPU."""

from pathlib import Path

IMAGE_TOKENS = 8
"""Tokens that a picture puts before the prompt."""

VOCABULARY = 1000


def make_image_model(folder: Path) -> Path:
    """Write the model into a new folder, with what vLLM reads beside its weights."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    vision = Blip2VisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        image_size=56, patch_size=14,
    )  # fmt: skip
    queries = Blip2QFormerConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        encoder_hidden_size=64, vocab_size=VOCABULARY,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
    )  # fmt: skip
    config = Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=queries.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=VOCABULARY - 1,
        architectures=["Blip2ForConditionalGeneration"],
    )
    torch.manual_seed(1)
    model = Blip2ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY - 1)}
    words["<image>"] = VOCABULARY - 1
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2"
    )
    pictures = BlipImageProcessorPil(size={"height": 56, "width": 56})
    Blip2Processor(pictures, fast, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)
    return folder
