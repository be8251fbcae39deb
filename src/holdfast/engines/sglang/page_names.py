"""Names of pages that other engines know: Holdfast's keys, in place of SGLang's hashes.

SGLang gives its storage names of pages and no tokens, and its names come from tokens alone. But its
plugin interface lets a function that makes them be wrapped. So with `layout: portable` a page's
name is its key in hexadecimal digits, and everything else of SGLang works with it as before.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from holdfast.blocks.key import KEY_BYTES, Chain
from holdfast.errors import BlockError

HASH_FUNCTION = "sglang.srt.mem_cache.utils.get_hash_str"
"""The function of SGLang that names pages."""

NAMES_MAX = 1 << 18
"""Pages whose position in their context is known; those used longest ago are forgotten."""


class PageNames:
    """Names the pages of contexts of one model. `begin()` returns an empty chain of keys.

    Any thread may call it: SGLang names pages in its scheduler and in threads of its storage.
    """

    def __init__(self, begin: Callable[[], Chain]) -> None:
        self._begin = begin
        self._page_tokens = begin().block_tokens
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()
        """The key before each key; the first of a context has an empty one."""

    def name(
        self,
        original: Callable[..., Any],
        token_ids: Any,
        prior_hash: str | None = None,
        page_size: int | None = None,
    ) -> Any:
        """Return the names of the pages of `token_ids`, which follow the page `prior_hash`.

        A context with a salt or an extra key, and pages of another size, keep SGLang's own names.
        """
        own = prior_hash is None or _is_key(prior_hash)
        if not own or page_size != self._page_tokens or getattr(token_ids, "is_bigram", False):
            return original(token_ids, prior_hash, page_size)
        parent = bytes.fromhex(prior_hash) if prior_hash else b""
        tokens = _tokens(token_ids)
        chain = self._begin()
        if parent:
            chain.keys.append(parent)
        chain.append(tokens)
        keys = chain.keys[bool(parent) :]
        for before, key in pairwise([parent, *keys]):
            self._parents[key] = before
            self._touch(key)
        while len(self._parents) > NAMES_MAX:
            self._parents.popitem(last=False)
        names = [key.hex() for key in keys]
        if len(tokens) % page_size:  # part of a page, which is never stored
            rest = tokens[len(keys) * page_size :].tobytes()
            names.append(hashlib.sha256([parent, *keys][-1] + rest).hexdigest())
        return names

    def context(self, names: Sequence[str]) -> Chain:
        """Return the keys of a context up to the last of these pages, which follow each other.

        Raises BlockError if they do not, or if the pages before them are not known any more.
        """
        keys = keys_of(names)
        chain, before = self._begin(), self._parents.get(keys[0])
        path = [*reversed(keys)]
        while before:
            path.append(before)
            before = self._parents.get(before)
        follow = all(self._parents.get(key) == parent for parent, key in pairwise(keys))
        if before is None or not follow:
            raise BlockError("pages to save do not follow each other in a context that is known")
        for key in reversed(path):
            self._touch(key)
        chain.keys.extend(reversed(path))
        return chain

    def _touch(self, key: bytes) -> None:
        """Make a page the one that was used last; another thread may have forgotten it."""
        with suppress(KeyError):
            self._parents.move_to_end(key)

    def run(self, names: Sequence[str]) -> Chain:
        """Return a chain of these pages alone, to look them up, up to the first of SGLang's own."""
        chain = self._begin()
        chain.keys.extend(keys_of(list(takewhile(_is_key, names))))
        return chain


class NamingHook(NamedTuple):
    """The hook that has been put around SGLang's function in this process."""

    names: list[PageNames]

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.names:
            return original(*args, **kwargs)
        return self.names[-1].name(original, *args, **kwargs)


_hook = NamingHook([])


def rename_pages(names: PageNames) -> None:
    """Have SGLang name its pages so from now on, in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    first = not _hook.names
    _hook.names.append(names)
    if first:
        HookRegistry.register(HASH_FUNCTION, _hook, HookType.AROUND)
        HookRegistry.apply_hooks()


def keys_of(names: Sequence[str]) -> list[bytes]:
    """Return the keys of pages; raise BlockError for names that SGLang made itself."""
    if not all(map(_is_key, names)):
        raise BlockError(
            "pages of a request with a salt, an extra key or an adapter are not portable, and are "
            "not stored"
        )
    return [bytes.fromhex(name) for name in names]


def _is_key(name: str) -> bool:
    """Whether a page's name is a key; SGLang's own names are longer."""
    return len(name) == 2 * KEY_BYTES


def _tokens(token_ids: Any) -> np.ndarray[Any, np.dtype[np.integer[Any]]]:
    """Return the tokens of SGLang's key of a context, or of a list."""
    raw = getattr(token_ids, "raw_token_ids", None)
    found = raw() if raw is not None else getattr(token_ids, "token_ids", token_ids)
    return np.asarray(found[: len(token_ids)], dtype=np.int64)
