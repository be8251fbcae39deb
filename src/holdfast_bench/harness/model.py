"""Small Llama-shaped models, generated locally: random weights, a tokenizer from local text."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError, HoldfastError
from holdfast.scratch import scratch_folder

MARKER = "holdfast-model.json"
"""File that names the generated model in a folder; a folder without it is never replaced."""

SEED = 20_26
POSITIONS_MAX = 32_768
SPECIAL_TOKENS = ("<s>", "</s>")
CORPUS_BYTES_MAX = 6 << 20


class SmallModelShape(msgspec.Struct, frozen=True):
    """Parameters that determine a generated model's bytes, together with the tokenizer's text."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 32_000
    revision: int = 1

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token, in the model's own data type."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


SHAPES = {
    shape.name: shape
    for shape in (
        SmallModelShape("tiny", 256, 4, 8, 4, 704),
        SmallModelShape("small", 768, 14, 12, 4, 2048),
        SmallModelShape("demo", 1024, 20, 16, 4, 2816),
    )
}
"""19, 137 and 291 million parameters: for tests, quick looks, and time to first token."""


def make(name: str, folder: Path | None = None) -> Path:
    """Return the Hugging Face folder of a generated model; generate it on first use (seconds).

    Raises ConfigError for an unknown name, HoldfastError if the folder cannot be written.
    """
    if name not in SHAPES:
        raise ConfigError(f"model {name!r} is not one that can be made: {', '.join(SHAPES)}")
    shape = SHAPES[name]
    target = folder or default_folder(name)
    if is_complete(target, shape):
        return target
    if target.exists() and not (target / MARKER).exists():
        raise HoldfastError(
            f"{str(target)!r} exists and holds no model made here; remove it or name another folder"
        )
    try:
        _make(target, shape)
    except OSError as error:
        raise HoldfastError(
            f"cannot make the model in {str(target)!r}: {error.strerror}; "
            "free some space there or name a model of yours with --model"
        ) from error
    return target


def _make(target: Path, shape: SmallModelShape) -> None:
    """Fill a scratch folder and rename it to the target, so that the target is always complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.parent, f".{target.name}") as scratch:
        folder = scratch / target.name
        folder.mkdir()
        _write_tokenizer(folder, shape)
        _write_config(folder, shape)
        _write_weights(folder, shape)
        (folder / MARKER).write_bytes(msgspec.json.encode(shape))
        shutil.rmtree(target, ignore_errors=True)
        try:
            folder.rename(target)
        except OSError:
            # Another process may have generated the same model in the meantime.
            if not is_complete(target, shape):
                raise


def default_folder(name: str) -> Path:
    """Return the folder that keeps a generated model between runs."""
    return Path.home() / ".cache" / "holdfast" / "models" / name


def is_complete(folder: Path, shape: SmallModelShape) -> bool:
    """Whether the folder holds this model, complete."""
    try:
        return (folder / MARKER).read_bytes() == msgspec.json.encode(shape)
    except OSError:
        return False


def standard_library() -> list[Path]:
    """Return the Python standard library's top-level source files, longest first."""
    folder = Path(sysconfig.get_path("stdlib"))
    return sorted(folder.glob("*.py"), key=lambda file: (-file.stat().st_size, file.name))


def _corpus() -> Iterator[str]:
    """Yield `CORPUS_BYTES_MAX` of local text to train the tokenizer on."""
    left = CORPUS_BYTES_MAX
    for file in standard_library():
        text = file.read_text(encoding="utf-8", errors="replace")
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _write_tokenizer(folder: Path, shape: SmallModelShape) -> None:
    """Train a byte-level BPE tokenizer: it encodes any text, code at about 4 bytes per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    # Every id the model can produce must have a text.
    spares = range(tokenizer.get_vocab_size(), shape.vocabulary)
    tokenizer.add_tokens([f"<{spare}>" for spare in spares])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "model_max_length": POSITIONS_MAX,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _write_config(folder: Path, shape: SmallModelShape) -> None:
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS_MAX,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "vocab_size": shape.vocabulary,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    generation = {"bos_token_id": 0, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


def _write_weights(folder: Path, shape: SmallModelShape) -> None:
    """Draw random weights, scaled so that each layer keeps the magnitude of its activations."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, rows, columns, scale in _matrices(shape):
        drawn = torch.randn(rows, columns, generator=generator)
        tensors[name] = (drawn * scale).to(torch.bfloat16)
    norms = ["model.norm.weight"]
    for layer in range(shape.layers):
        norms += [
            f"model.layers.{layer}.{at}_layernorm.weight" for at in ("input", "post_attention")
        ]
    for name in norms:
        tensors[name] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _matrices(shape: SmallModelShape) -> Iterator[tuple[str, int, int, float]]:
    """Yield name, rows, columns and standard deviation of every matrix.

    Queries, keys and the output head are drawn wider: attention that picks tokens, and logits
    with few near-ties, make the generated text depend on the whole context.
    """
    hidden, inner = shape.hidden, shape.intermediate
    keys = shape.kv_heads * shape.head_size
    unit = hidden**-0.5
    yield "model.embed_tokens.weight", shape.vocabulary, hidden, 1.0
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", hidden, hidden, 1.5 * unit
        yield f"{prefix}.self_attn.k_proj.weight", keys, hidden, 1.5 * unit
        yield f"{prefix}.self_attn.v_proj.weight", keys, hidden, unit
        yield f"{prefix}.self_attn.o_proj.weight", hidden, hidden, unit
        yield f"{prefix}.mlp.gate_proj.weight", inner, hidden, unit
        yield f"{prefix}.mlp.up_proj.weight", inner, hidden, unit
        yield f"{prefix}.mlp.down_proj.weight", hidden, inner, inner**-0.5
    yield "lm_head.weight", shape.vocabulary, hidden, 3.0 * unit
