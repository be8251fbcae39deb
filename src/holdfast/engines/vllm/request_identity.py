"""What the KV of a request depends on besides its tokens: salt, LoRA adapter, images and audio.

Each becomes part of the key of the block in which it begins, and so of all later keys. A request
with an input that no digest names is declined: it is computed, and nothing of it is saved.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.client.weights_digest import (
    NoDigestError,
    check_unchanged,
    files_digest,
    process_start_ns,
)
from holdfast.errors import BlockError

ADAPTER_FILES = (".json", ".safetensors", ".bin", ".pt")
"""Endings of the files of an adapter that vLLM may read."""

_CONTENT_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""vLLM's hash of an image or sound: BLAKE3, SHA-256 or SHA-512 as hexadecimal digits."""

MEDIA_MAX = 65_536
"""Images and sounds whose content is remembered; those used longest ago are forgotten."""

_log = logging.getLogger("vllm.holdfast")

Extras = Mapping[int, Sequence[bytes]]
"""By number of a block: what its key depends on besides the tokens."""


class UnnamedInputError(BlockError):
    """An input of a request that no digest names; `reason` is the one that is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RequestIdentity(NamedTuple):
    """What the KV of a request depends on besides its tokens.

    `inputs`: what counts from the first token on. `media`: the first token of each image or sound,
    and what names it there.
    """

    salt: bytes
    inputs: tuple[bytes, ...]
    media: tuple[tuple[int, bytes], ...]


NO_IDENTITY = RequestIdentity(b"", (), ())
"""That of a request whose keys depend on its tokens only."""


class _Adapter(NamedTuple):
    """An adapter as it was when it was first used: the state of its files, and their digest.

    `digest` empty: the files do not say what vLLM has loaded.
    """

    state: tuple[tuple[int, ...], ...]
    digest: str


class AdapterDigests:
    """Digests of LoRA adapters, by vLLM's number of an adapter; read from their files once.

    vLLM may load an adapter again from its files at any time. So if they change, nothing says which
    content a request is computed with, and from then on the adapter has no digest. vLLM's own cache
    names pages by the adapter's name and path, so an adapter that is loaded again under both with
    another content has no digest either.
    """

    def __init__(self, settings: str = "", since_ns: int | None = None) -> None:
        """`settings`: what the engine's options change in adapters, as `adapter_settings` returns.

        `since_ns`: files that changed later have no digest; default: the start of this process.
        """
        self._since_ns = since_ns
        self._settings = settings
        self._adapters: dict[int, _Adapter] = {}
        self._by_name: dict[tuple[str, str], str] = {}
        """Digest by name and path; empty for those that may have had two contents."""

    def digest(self, lora_request: Any) -> str:
        """Return the digest of a request's adapter; raise UnnamedInputError if it has none."""
        number, folder = lora_request.lora_int_id, Path(lora_request.lora_path).expanduser()
        named = (lora_request.lora_name, lora_request.lora_path)
        try:
            files = _adapter_files(folder)
            state = tuple(_state(file) for file in files)
        except OSError as error:
            self._by_name.setdefault(named, "")  # vLLM may have loaded what was there before
            raise UnnamedInputError("lora", f"adapter {str(folder)!r}: {error}") from error
        known = self._adapters.get(number)
        if known is None:
            known = _Adapter(state, self._read(folder, files))
        elif known.state != state and known.digest:
            _log.warning(
                "requests with the adapter %r are computed from now on: its files changed after "
                "their first use, and vLLM may have loaded either content; load the new adapter "
                "from another folder, and start the engine again to use this one",
                str(folder),
            )
            known = _Adapter(state, "")
        if self._by_name.setdefault(named, known.digest) != known.digest:
            self._by_name[named] = ""
            if known.digest:
                _log.warning(
                    "requests with the adapter %r at %r are computed from now on: it may have had "
                    "another content in this engine, and vLLM's own cache may have pages of either "
                    "one; load the new adapter from another folder, or start the engine again",
                    *named,
                )
            known = _Adapter(state, "")
        self._adapters[number] = known
        if not known.digest:
            raise UnnamedInputError("lora", f"adapter {str(folder)!r} has no digest")
        return known.digest

    def _read(self, folder: Path, files: Sequence[Path]) -> str:
        since_ns = process_start_ns() if self._since_ns is None else self._since_ns
        try:
            digest = files_digest("adapter", folder, files)
            check_unchanged(folder, files, since_ns)
        except (NoDigestError, OSError) as error:
            _log.warning("requests with the adapter %r are computed: %s", str(folder), error)
            return ""
        return f"{digest} {self._settings}"


class MediaDigests:
    """Digests of images and sounds as their encoder gets them.

    vLLM takes names of items from clients (`uuid`), and hashes those together with the options of
    the processor, so its names alone do not say what the content is. An engine uses what it has
    computed for a name again, so a name that has had two contents in this process has no digest.
    """

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, bytes] = OrderedDict()

    def digest(self, feature: Any) -> bytes:
        """Return 16 bytes; raise UnnamedInputError if nothing says what the content is."""
        named = feature.identifier
        if not _has_content_hash(feature):
            # A name that a client chose: it may give the same name to something else.
            raise UnnamedInputError(
                "multimodal", f"{feature.modality} {str(named)[:80]!r} has no hash of its content"
            )
        try:
            found = _content_digest(feature)
        except UnnamedInputError:
            self._remember(named, b"")
            raise
        if self._remember(named, found) != found:
            raise UnnamedInputError(
                "multimodal", f"{feature.modality} {named!r} has had another content in this engine"
            )
        return found

    def _remember(self, named: str, found: bytes) -> bytes:
        """Note a content of a name, empty if it is unknown; return the only one it has had."""
        if self._by_name.setdefault(named, found) != found:
            self._by_name[named] = b""
        self._by_name.move_to_end(named)
        if len(self._by_name) > MEDIA_MAX:
            self._by_name.popitem(last=False)
        return self._by_name[named]


def adapter_settings(lora_config: Any) -> str:
    """Return what vLLM's options change in adapters; empty if it serves none."""
    if lora_config is None:
        return ""
    return f"{lora_config.lora_dtype} {getattr(lora_config, 'target_modules', None)}"


def why_declined(request: Any) -> str | None:
    """Return why block keys cannot identify this request's KV at all; None if they may."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "embeds"
    if request.resumable:
        return "streaming_input"
    return None


def why_not_read(request: Any) -> str | None:
    """Return why vLLM reads no cached KV for this request; None if it does."""
    if not request.skip_reading_prefix_cache:
        return None
    sampling = request.sampling_params
    asks_logprobs = sampling is not None and (
        sampling.prompt_logprobs is not None
        or getattr(sampling, "prompt_logprob_token_ids", None) is not None
    )
    return "prompt_logprobs" if asks_logprobs else "skip_reading_prefix_cache"


def identity_of(
    request: Any, epoch: bytes, adapters: AdapterDigests, media: MediaDigests
) -> RequestIdentity:
    """Return what separates a request's keys from others of the same tokens.

    `epoch`: changes when the engine's weights do. `adapters` and `media` remember the content of
    each input, so that a later one of the same name is not taken for it. Raises UnnamedInputError
    for an input without a digest.
    """
    named, unnamed = _media(request, media)
    salt = request.cache_salt
    inputs = [b"epoch:" + epoch] if epoch else []
    if request.lora_request is not None:
        inputs.append(b"adapter:" + adapters.digest(request.lora_request).encode())
    if unnamed:
        raise unnamed[0]
    return RequestIdentity(
        salt=b"salt:" + salt.encode("utf-8", "surrogatepass") if salt else b"",
        inputs=tuple(inputs),
        media=tuple(named),
    )


def extras_of(
    identity: RequestIdentity, block_tokens: int, *, salted: bool = True, lookahead: int = 0
) -> Extras:
    """Return what the keys of blocks of this size depend on besides their tokens.

    `salted` False: without the salt, as keys of the public domain are. `lookahead`: tokens after a
    block that its content depends on, too.
    """
    found: dict[int, list[bytes]] = {}
    first = [identity.salt] if salted and identity.salt else []
    if first or identity.inputs:
        found[0] = [*first, *identity.inputs]
    for offset, name in identity.media:
        block = max(0, offset - lookahead) // block_tokens
        found.setdefault(block, []).append(b"media:" + name)
    return found


def _has_content_hash(feature: Any) -> bool:
    """Return whether vLLM's name of an image or sound has the form of a hash of its content.

    The name may still be one that a client chose, or be made from it.
    """
    named = feature.identifier
    return isinstance(named, str) and _CONTENT_HASH.fullmatch(named) is not None


def _media(
    request: Any, digests: MediaDigests
) -> tuple[list[tuple[int, bytes]], list[UnnamedInputError]]:
    """Return the first token of each image or sound of a request, and what names it there.

    The second list has the errors of those without a digest.
    """
    found: list[tuple[int, bytes]] = []
    unnamed: list[UnnamedInputError] = []
    for feature in request.mm_features or ():
        named, place = feature.identifier, feature.mm_position
        try:
            digest = digests.digest(feature)
        except UnnamedInputError as error:
            unnamed.append(error)
            continue
        name = f"{feature.modality}:{place.offset}+{place.length}:{named}".encode()
        found.append((place.offset, name + b":" + digest))
    return found, unnamed


def _content_digest(feature: Any) -> bytes:
    """Return 16 bytes; raise UnnamedInputError if the content is elsewhere, or has no digest."""
    item = feature.data
    # In vLLM's cache in shared memory an item says where its content is, and not what it is.
    is_elsewhere = item is None or "address" in item
    if is_elsewhere or any(element.data is None for element in item.values()):
        raise UnnamedInputError(
            "multimodal",
            f"the content of {feature.modality} {feature.identifier!r} is not in this process; "
            "start vLLM with --mm-processor-cache-type lru",
        )
    # A client may choose a name like a hash: no other content must be made to fit the digest.
    whole = hashlib.blake2b(digest_size=16, person=b"holdfast-media")
    for field, element in sorted(item.items(), key=lambda each: each[0]):
        whole.update(f"{field}=".encode())
        _add_content(whole, element.data)
    return whole.digest()


def _add_content(whole: Any, content: Any) -> None:
    """Add tensors, nested as vLLM nests them, or a plain value to a hash.

    Raises UnnamedInputError for anything else: its text may leave out what makes it different.
    """
    if isinstance(content, list | tuple):
        whole.update(f"[{len(content)}]".encode())
        for part in content:
            _add_content(whole, part)
    elif hasattr(content, "detach"):
        import torch  # not before vLLM has it

        tensor = content.detach().cpu().contiguous()
        whole.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif content is None or isinstance(content, int | float | str | bytes):
        whole.update(repr(content).encode())
    else:
        raise UnnamedInputError(
            "multimodal", f"content of the type {type(content).__name__} has no digest"
        )


def _adapter_files(folder: Path) -> list[Path]:
    """Return the files of an adapter's folder; raise OSError if it is no folder or has none."""
    files = sorted(file for file in folder.iterdir() if file.suffix in ADAPTER_FILES)
    if not files:
        raise FileNotFoundError(f"the folder has no file that ends in {', '.join(ADAPTER_FILES)}")
    return files


def _state(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
