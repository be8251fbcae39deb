"""What a node tells a session about the lossy codec of its domain.

A session that names exact blocks is offered the codec if a gate record permits it, and may connect
again with the quantised fingerprint. Nothing changes for the session until it does.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import QuantisedLayout
from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError, RefusedError
from holdfast.store.store import Store
from holdfast.wire.local.messages import Hello

_decoder = msgspec.json.Decoder(Fingerprint)

NOT_DESCRIBED = (
    "blocks stay exact, because this client does not describe them: its hello has no fingerprint "
    "as JSON in description"
)


class CodecOffer(NamedTuple):
    """The codec that a session may connect again with, its version, or why it gets none."""

    codec: str = ""
    version: int = 0
    why: str = ""


def offer_codec(store: Store, hello: Hello, namespace: Namespace) -> CodecOffer:
    """Return the offer for a session with a valid domain.

    If the session names quantised blocks, its commits are quantised from now on. Raises
    RefusedError if they are not permitted.
    """
    fingerprint = _described(hello)
    if fingerprint is None:
        asked = hello.domain in store.options.quantise
        return CodecOffer(why=NOT_DESCRIBED if asked and hello.description else "")
    choice = store.quantise.choose(hello.domain, fingerprint)
    layout = fingerprint.representation
    if isinstance(layout, QuantisedLayout):
        if choice.why:
            raise RefusedError(
                f"quantised blocks: {choice.why}; or restart the engine to go on exact"
            )
        if layout.raw_bytes != hello.raw_bytes or layout.block_tokens != hello.block_tokens:
            raise RefusedError(
                f"hello.raw_bytes is {hello.raw_bytes} and block_tokens {hello.block_tokens}; the "
                f"layout in description has {layout.raw_bytes} and {layout.block_tokens}"
            )
        store.quantise.enter(namespace, fingerprint)
        return CodecOffer()
    chosen = choice.fingerprint.representation
    if isinstance(chosen, QuantisedLayout):
        return CodecOffer(chosen.codec, chosen.codec_version)
    return CodecOffer(why=choice.why)


def _described(hello: Hello) -> Fingerprint | None:
    """Return the fingerprint in a hello's description; None if it has none that is its own."""
    try:
        found = _decoder.decode(hello.description)
    except (msgspec.MsgspecError, BlockError, RecursionError, UnicodeEncodeError):
        return None
    return found if found.digest() == hello.fingerprint else None
