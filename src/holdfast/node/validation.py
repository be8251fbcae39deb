"""Validate requests of engines and other nodes: every field has a bound, which errors name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from holdfast.blocks.key import KEY_BYTES, unpack_keys
from holdfast.config import DEADLINE_S_MAX
from holdfast.errors import BlockError, NotFollowed, ProtocolError
from holdfast.limits import CHAIN_BLOCKS_MAX, LIST_KEYS_MAX
from holdfast.metrics import OTHER
from holdfast.plan.cost import QueuedPrefill
from holdfast.session import ROWS_MAX, check_seconds
from holdfast.store.activity import PromptCounts
from holdfast.store.estimates import EngineId
from holdfast.store.hints import EngineTurn
from holdfast.store.lookup import PromptTokens
from holdfast.store.scrub import ScrubRequest
from holdfast.wire.local import messages as m

BLOCK_TOKENS_MAX = 1 << 20
ELEMENT_BYTES_MAX = 16
QUEUED_TOKENS_MAX = 1 << 40
"""More than an engine computes in a month."""

TOKENS_MAX = CHAIN_BLOCKS_MAX * BLOCK_TOKENS_MAX
VERIFY_S_MAX = 30.0

PEER_CHARS_MAX = 256
DOMAIN_CHARS_MAX = 64
"""As in a configuration."""

DESCRIPTION_CHARS_MAX = 64 << 10
"""Ample for a fingerprint's description as text."""

PUBLISH_BYTES_MAX = 64

MAX_INLINE_BLOCKS = 4096
"""A longer chain is planned in a thread: it takes about 10 us a block and delays other sessions."""


def unpack_chain(packed: bytes) -> list[bytes]:
    """Split packed keys; raise BlockError if there are more than `CHAIN_BLOCKS_MAX`."""
    if len(packed) > CHAIN_BLOCKS_MAX * KEY_BYTES:
        raise BlockError(
            f"{len(packed) // KEY_BYTES} keys, the limit is {CHAIN_BLOCKS_MAX}; send fewer at once"
        )
    return unpack_keys(packed)


def check_hello(hello: m.Hello) -> None:
    """Raise ProtocolError if a field of a hello is too long, before any other use of it."""
    for field, length, limit in (
        ("peer", len(hello.peer), PEER_CHARS_MAX),
        ("domain", len(hello.domain), DOMAIN_CHARS_MAX),
        ("description", len(hello.description), DESCRIPTION_CHARS_MAX),
        ("publish", len(hello.publish), PUBLISH_BYTES_MAX),
        ("fingerprint", len(hello.fingerprint), KEY_BYTES),
    ):
        if length > limit:
            raise ProtocolError(
                f"hello.{field} has a length of {length}, the limit is {limit}; shorten it"
            )


def why_not_followed(why: str) -> NotFollowed:
    """Return the reason of this name; OTHER for a name that only a newer engine knows."""
    return NotFollowed(why) if why in frozenset(NotFollowed) else NotFollowed.OTHER


def prompt_tokens(engine: EngineId, process: int, request: m.Cover) -> PromptTokens:
    """Return the prompt of a cover request; raise HoldfastError if a field is out of bounds."""
    if not 0 <= request.have <= request.tokens <= TOKENS_MAX:
        raise ProtocolError(
            f"cover: have {request.have} and tokens {request.tokens} do not satisfy "
            f"0 <= have <= tokens <= {TOKENS_MAX}"
        )
    check_seconds("cover.limit_s", request.limit_s, DEADLINE_S_MAX)
    check_seconds("cover.deadline_s", request.deadline_s, DEADLINE_S_MAX)
    queued = queued_prefill("cover", request)
    for tier, blocks in request.to_load.items():
        if not 0 <= blocks <= QUEUED_TOKENS_MAX:
            raise ProtocolError(
                f"cover: to_load of {tier!r} is {blocks}, not from 0 to {QUEUED_TOKENS_MAX}"
            )
    return PromptTokens(
        *(engine, request.tokens, request.have, request.limit_s, request.plan),
        queued,
        request.to_load,
        process,
    )


def engine_turn(engine: EngineId, process: int, request: m.Prestage) -> EngineTurn | None:
    """Return the turn of a request that waits; None if none does. Raises HoldfastError if invalid.

    The wait is not known while the prefill of the engine is not.
    """
    queued = queued_prefill("prestage", request)
    return EngineTurn(engine, queued, process) if request.queued else None


def queued_prefill(name: str, request: m.Cover | m.Prestage) -> QueuedPrefill:
    """Return an engine's queue; raise ProtocolError if it is out of bounds."""
    queued, pairs = request.queued_tokens, request.queued_pairs
    if not (0 <= queued <= QUEUED_TOKENS_MAX and 0 <= pairs <= queued * QUEUED_TOKENS_MAX):
        raise ProtocolError(
            f"{name}: queued_tokens {queued} and queued_pairs {pairs} do not satisfy "
            f"0 <= tokens <= {QUEUED_TOKENS_MAX} and 0 <= pairs <= tokens * {QUEUED_TOKENS_MAX}"
        )
    return QueuedPrefill(queued, pairs)


def prompt_counts(tiers: Collection[str], prompt: tuple[int, int, dict[str, int]]) -> PromptCounts:
    """Return an engine's counts of a prompt; raise ProtocolError if they are inconsistent.

    Tokens of a tier that the node does not have count as `OTHER`: a newer engine may name it,
    and names must not grow without limit.
    """
    tokens, engine, loaded = prompt
    named = Counter[str]()
    for tier, number in loaded.items():
        named[tier if tier in tiers else OTHER] += number
    counts = [engine, *loaded.values()]
    if not 0 <= sum(counts) <= tokens <= TOKENS_MAX or min(counts) < 0:
        raise ProtocolError(
            f"observed.prompts: {engine} tokens of the engine's own and {sum(loaded.values())} "
            f"loaded ones of {tokens} do not satisfy 0 <= their sum <= tokens <= {TOKENS_MAX}"
        )
    return PromptCounts(tokens, engine, named)


def scrub_request(request: m.Verify) -> ScrubRequest:
    """Return the blocks to verify; raise ProtocolError if a field is out of bounds."""
    if not 0 <= request.seconds <= VERIFY_S_MAX or request.rate < 0:
        raise ProtocolError(
            f"verify: {request.seconds:g} s at {request.rate} bytes/s; seconds must be from 0 to "
            f"{VERIFY_S_MAX:g}, and the rate not negative"
        )
    return ScrubRequest(request.fingerprint, request.start, request.seconds, request.rate)


def check_key_page(start: int, limit: int) -> None:
    """Raise BlockError unless a page of keys is within bounds."""
    check_within("list_keys.limit", limit, LIST_KEYS_MAX)
    if not 0 <= start <= ROWS_MAX:
        raise BlockError(f"list_keys.start is {start}, not from 0 to {ROWS_MAX}")


def check_bytes(what: str, value: bytes) -> None:
    """Raise BlockError unless a value has the length of a key."""
    if len(value) != KEY_BYTES:
        raise BlockError(f"{what} has {len(value)} bytes, not {KEY_BYTES}")


def check_within(what: str, value: int, limit: int) -> None:
    """Raise BlockError unless a number is from 1 to the limit."""
    if not 1 <= value <= limit:
        raise BlockError(f"{what} is {value}, not from 1 to {limit}")
