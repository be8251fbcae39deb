"""What a node tells a session about the lossy codec of its domain.

A session that names exact blocks is offered the codec if a gate record permits it, and may connect
again with the quantised fingerprint. Nothing changes for the session until it does.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple

import msgspec

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import QuantisedLayout
from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError, RefusedError
from holdfast.fairness.fair_queue import WorkItem
from holdfast.fairness.fair_threads import FairThreads
from holdfast.node.local.threads import run_fair
from holdfast.store.quantise import QuantiseChoice
from holdfast.store.store import Store
from holdfast.wire.local.messages import Hello

RECORD_S = 2.0
"""Longest time that the answer to a hello waits for a gate record."""

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


async def offer_codec(
    store: Store, threads: FairThreads, hello: Hello, namespace: Namespace
) -> CodecOffer:
    """Return the offer for a session with a valid domain; its gate record is read on `threads`.

    If the session names quantised blocks, its commits are quantised from now on. Raises
    RefusedError if they are not permitted.
    """
    fingerprint = _described(hello)
    if fingerprint is None:
        asked = hello.domain in store.options.quantise
        return CodecOffer(why=NOT_DESCRIBED if asked and hello.description else "")
    choice = await _choose(store, threads, hello.domain, fingerprint)
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


async def _choose(
    store: Store, threads: FairThreads, domain: str, fingerprint: Fingerprint
) -> QuantiseChoice:
    """Return the fingerprint that the node has for a session; that of exact blocks if it is late.

    The record is a file, and its drive may hang: the event loop does not wait for it. A read that
    has not begun when its time is over is cancelled.
    """
    choose = partial(store.quantise.choose, domain, fingerprint)
    if domain not in store.options.quantise:
        return choose()  # reads no file
    domain_id = store.domain_ids[domain]
    reading = run_fair(threads, WorkItem(domain_id, share=store.share(domain_id)), choose)
    try:
        return await asyncio.wait_for(reading, RECORD_S)
    except TimeoutError:
        why = (
            f"domains.{domain}.quantise: the gate record was not read from "
            f"{str(store.options.gates)!r} within {RECORD_S:g} s; blocks stay exact; see that the "
            "folder's drive answers"
        )
        return QuantiseChoice(fingerprint, why)


def _described(hello: Hello) -> Fingerprint | None:
    """Return the fingerprint in a hello's description; None if it has none that is its own."""
    try:
        found = _decoder.decode(hello.description)
    except (msgspec.MsgspecError, BlockError, RecursionError, UnicodeEncodeError):
        return None
    return found if found.digest() == hello.fingerprint else None
