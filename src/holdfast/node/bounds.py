"""What a request may say: every bound of it, in an error that names value and limit."""

from __future__ import annotations

from holdfast.blocks.key import KEY_BYTES, unpack_keys
from holdfast.config import DEADLINE_S_MAX
from holdfast.errors import BlockError, ProtocolError
from holdfast.limits import CHAIN_BLOCKS_MAX
from holdfast.store.cover import Prompt
from holdfast.store.judgement import Engine
from holdfast.store.scrub import Wish
from holdfast.wire import messages as m

BLOCK_TOKENS_MAX = 1 << 20
TOKENS_MAX = CHAIN_BLOCKS_MAX * BLOCK_TOKENS_MAX
VERIFY_S_MAX = 30.0

PEER_CHARS_MAX = 256
DOMAIN_CHARS_MAX = 64
"""What a configuration allows."""

DESCRIPTION_CHARS_MAX = 64 << 10
"""A fingerprint as text, and room."""

PUBLISH_BYTES_MAX = 64

JUDGED_HERE_BLOCKS = 4096
"""A longer chain is looked up and judged in a thread: some 10 us a block, and others wait."""


def keys_of(packed: bytes) -> list[bytes]:
    """Split keys, of which there may be so many."""
    if len(packed) > CHAIN_BLOCKS_MAX * KEY_BYTES:
        raise BlockError(
            f"{len(packed) // KEY_BYTES} keys, the limit is {CHAIN_BLOCKS_MAX}; send fewer at once"
        )
    return unpack_keys(packed)


def check_hello(hello: m.Hello) -> None:
    """Raise for a hello with a name that is too long, before anybody compares or notes it."""
    for field, length, limit in (
        ("peer", len(hello.peer), PEER_CHARS_MAX),
        ("domain", len(hello.domain), DOMAIN_CHARS_MAX),
        ("description", len(hello.description), DESCRIPTION_CHARS_MAX),
        ("publish", len(hello.publish), PUBLISH_BYTES_MAX),
        ("fingerprint", len(hello.fingerprint), KEY_BYTES),
    ):
        if length > limit:
            raise ProtocolError(
                f"hello.{field} has a length of {length}, not {limit} at most; shorten it"
            )


def prompt_of(engine: Engine, request: m.Cover) -> Prompt:
    """Return what is asked about, within its bounds."""
    if not 0 <= request.have <= request.tokens <= TOKENS_MAX:
        raise ProtocolError(
            f"cover: have {request.have}, tokens {request.tokens}: not in order from 0 to "
            f"{TOKENS_MAX}"
        )
    if not 0 <= request.limit_s <= DEADLINE_S_MAX:
        raise ProtocolError(
            f"cover.limit_s: {request.limit_s:g} is not from 0 to {DEADLINE_S_MAX:g}"
        )
    if not 0 <= request.deadline_s <= DEADLINE_S_MAX:
        raise ProtocolError(
            f"cover.deadline_s: {request.deadline_s:g} is not from 0 to {DEADLINE_S_MAX:g}"
        )
    return Prompt(engine, request.tokens, request.have, request.limit_s, request.plan)


def wish_of(request: m.Verify) -> Wish:
    """Return what is to be verified, within its bounds."""
    if not 0 <= request.seconds <= VERIFY_S_MAX or request.rate < 0:
        raise ProtocolError(
            f"verify: {request.seconds:g} s, {request.rate} bytes a second: not from 0 to "
            f"{VERIFY_S_MAX:g} s, or below 0"
        )
    return Wish(request.fingerprint, request.start, request.seconds, request.rate)


def check_bytes(what: str, value: bytes) -> None:
    """Raise unless a name has the bytes of one."""
    if len(value) != KEY_BYTES:
        raise BlockError(f"{what} has {len(value)} bytes, not {KEY_BYTES}")


def check_within(what: str, value: int, limit: int) -> None:
    """Raise unless a number is from 1 to the limit."""
    if not 1 <= value <= limit:
        raise BlockError(f"{what} is {value}, not from 1 to {limit}")
