"""One host pool of one rank; its pages are named blocks of a namespace of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.engines.sglang.pages import PoolPages
from holdfast.errors import BlockError, Outcome
from holdfast.named_blocks import BlockMemory, NamedSession, PrefixPosition


class HostPool:
    """A pool and the session with its blocks.

    `keys`: SGLang's hashes of pages; there is one answer for each. `fingerprint`: that of the
    blocks. `writes`: False if another rank writes these pages, because all ranks hold copies of
    them. Methods raise BlockError for keys that are not hashes.
    """

    def __init__(
        self, pages: PoolPages, session: NamedSession, fingerprint: bytes, *, writes: bool
    ) -> None:
        self._pages, self._session, self._writes = pages, session, writes
        self.fingerprint = fingerprint

    def held(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each page is held, on any tier."""
        return _good(self._session.exists(_names(keys)))

    def load(self, keys: Sequence[str], indices: Any, deadline_s: float) -> list[bool]:
        """Copy pages into the pool; return which are there now, whole and verified."""
        buffers = self._pages.to_load(indices)
        whole = self.load_into(keys, buffers.memory, deadline_s)
        buffers.take(whole)
        return whole

    def save(self, keys: Sequence[str], indices: Any, after: PrefixPosition) -> list[bool]:
        """Copy pages into the node's memory; return which are held now."""
        if not self._writes:
            return [True] * len(keys)
        buffers = self._pages.to_save(indices)
        return _good(self._session.put(_names(keys), buffers.memory, after))

    def load_into(
        self, keys: Sequence[str], memory: Sequence[BlockMemory], deadline_s: float
    ) -> list[bool]:
        """Copy pages into memory outside of the pool; return which are there now."""
        return _good(self._session.get(_names(keys), memory, deadline_s))

    def save_from(self, keys: Sequence[str], memory: Sequence[BlockMemory]) -> list[bool]:
        """Copy pages from memory outside of the pool; return which are held now."""
        return (
            _good(self._session.put(_names(keys), memory)) if self._writes else [True] * len(keys)
        )

    def close(self) -> None:
        """End the connection to the node."""
        self._session.close()


def position_after(prefix_keys: Sequence[str] | None) -> PrefixPosition:
    """Return the position of pages behind these; that of a first page if SGLang names none."""
    if not prefix_keys:
        return PrefixPosition()
    return PrefixPosition(_names(prefix_keys[-1:])[0], len(prefix_keys))


def _names(keys: Sequence[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(key) for key in keys]
    except ValueError:
        raise BlockError(
            "SGLang names a page by a text that is not a hash in hexadecimal digits; this version "
            "of SGLang is not supported"
        ) from None


def _good(outcomes: Sequence[Outcome]) -> list[bool]:
    return [outcome is Outcome.OK for outcome in outcomes]
