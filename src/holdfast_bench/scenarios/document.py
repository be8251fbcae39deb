"""Read a long real text as tokens, for the prompts of the demo and the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast_bench.harness.model import standard_library

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_of(model: Path) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises ConfigError if it has none."""
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"--model: {str(model)!r} holds no tokenizer.json; name a Hugging Face model folder"
        )
    return Tokenizer.from_file(str(file))


def read_tokens(tokenizer: Tokenizer, document: Path | None, count: int) -> list[int]:
    """Return the first `count` tokens of a text file.

    The default is the longest source file of the Python standard library. Raises ConfigError if
    the file cannot be read or is too short.
    """
    file = document or standard_library()[0]
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"--document: cannot read {str(file)!r}: {error.strerror}; name a text file"
        ) from error
    tokens = tokens_of(tokenizer, text)
    if len(tokens) < count:
        raise ConfigError(
            f"--document: {str(file)!r} has {len(tokens)} tokens and {count} are needed; "
            "lower --tokens or name a longer text"
        )
    return tokens[:count]


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, without special tokens."""
    encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return encoded
