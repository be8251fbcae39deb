"""The digest of a model folder: its config and every byte of its weights.

Two checkpoints under one name have served wrong KV elsewhere, so names do not count, contents do.
Reading is done once: digests are remembered by path, size and time of change. In a Hugging Face
cache the blobs are named by their content already, and nothing is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.errors import HoldfastError
from holdfast.limits import MIB

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG = "config.json"
SLOW_S = 5.0

_log = logging.getLogger("vllm.holdfast")


class NoDigestError(HoldfastError):
    """The weights cannot be told from others; the message says why and how to name them."""


def folder_digest(folder: Path, memory: Path | None = None) -> str:
    """Return 32 hex digits over config and weights in `folder`; raise NoDigestError without any.

    `memory` is the file that remembers digests; by default one in the user's cache folder.
    """
    import xxhash

    files = sorted(_files(folder))
    if not any(file.name.endswith(WEIGHTS) for file in files):
        raise NoDigestError(
            f"model folder {str(folder)!r} holds no weights ({', '.join(WEIGHTS)}); "
            "set model_digest to a name that changes whenever the weights do"
        )
    whole = xxhash.xxh3_128()
    with _remembered(memory or Path("~/.cache/holdfast/digests.json")) as known:
        for file in files:
            digest = _blob_name(file) or _file_digest(file, known)
            whole.update(f"{file.relative_to(folder)}\0{digest}\0".encode())
    return whole.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        if (file.name == CONFIG or file.name.endswith(WEIGHTS)) and file.is_file():
            yield file


def _blob_name(file: Path) -> str | None:
    """Return the content digest a Hugging Face cache gives a file, None elsewhere."""
    target = file.resolve()
    in_cache = file.is_symlink() and target.parent.name == "blobs"
    return target.name if in_cache and len(target.name) >= 40 else None  # noqa: PLR2004  # SHA-1 at least


def _file_digest(file: Path, known: dict[str, str]) -> str:
    import xxhash

    state = file.stat()
    name = f"{file.resolve()}:{state.st_size}:{state.st_mtime_ns}:{state.st_ino}"
    if name in known:
        return known[name]
    start_s = time.monotonic()
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as source:
        while chunk := source.read(8 * MIB):
            digest.update(chunk)
    seconds = time.monotonic() - start_s
    if seconds > SLOW_S:
        _log.info("read %s once to name its weights: %.0f s; model_digest spares it", file, seconds)
    known[name] = digest.hexdigest()
    return known[name]


@contextlib.contextmanager
def _remembered(memory: Path) -> Iterator[dict[str, str]]:
    """Lend what is remembered, and write it back; another process waits rather than reads twice."""
    try:
        memory = memory.expanduser()
        memory.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(memory, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, RuntimeError):
        yield {}  # a read-only home, or none, costs a second reading, nothing else
        return
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            known = msgspec.json.decode(file.read() or "{}", type=dict[str, str])
        except ValueError:
            known = {}
        before = dict(known)
        yield known
        if known != before:
            with contextlib.suppress(OSError):  # a full disk costs a second reading, too
                file.seek(0)
                file.truncate()
                json.dump(known, file, indent=1)
                file.flush()
