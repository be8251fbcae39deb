"""Forged, replayed, cross-domain and wrong-fingerprint requests: not one of them is a hit.

Four domains save what they have, the same tokens among it. Then each asks for the blocks of the
others in every way somebody could who has seen everything but a key: by their names, by names that
are nearly theirs, in a world where one field is another, in memory and over TCP. Tokens are forged
bit by bit, used again under other nonces, and kept too long.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.key import Chain
from holdfast.blocks.layout import Layout
from holdfast.blocks.world import World
from holdfast.buffers import aligned_buffer
from holdfast.errors import BlockError, RefusedError
from holdfast.limits import MIB, TOKEN_S_MAX
from holdfast.store.store import Store
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.contexts import FINGERPRINT, Contexts
from holdfast.wire import token
from holdfast.wire.target import Target

DOMAINS = ("acme", "birch", "cedar", "default")
CONTEXTS = 8
SHARED_CONTEXTS = 3
CONTEXT_BLOCKS = 8
BLOCK_TOKENS = 128
PAYLOAD_BYTES = 3_000
ASKED_AT_ONCE = 64
HOST_BYTES = 16 * MIB

_FETCH_EVERY = 16
_NOW = 1_000_000.0
_KEY = bytes(range(32))
_NONCES = b"n" * 64


class _Room(NamedTuple):
    """A store of several domains, what each has saved, and the way in from other nodes."""

    store: Store
    contexts: dict[str, Contexts]
    chains: dict[str, list[list[bytes]]]
    target: Target


def run(order: Order) -> Iterator[Tally]:
    """Ask across domains, with every field of a fingerprint changed, and with forged tokens."""
    with _room(order) as room:
        yield _across(room, order.share(1.25))
        yield _fingerprints(room.store)
    yield _tokens(order.share(5))


@contextlib.contextmanager
def _room(order: Order) -> Iterator[_Room]:
    secrets = {name: hashlib.blake2b(name.encode(), digest_size=32).digest() for name in DOMAINS}
    with contextlib.closing(Store(HOST_BYTES, [], secrets)) as store:
        store.take_foreign()
        store.start()
        contexts = {name: Contexts(store, PAYLOAD_BYTES, name) for name in DOMAINS}
        chains: dict[str, list[list[bytes]]] = {}
        for name in DOMAINS:
            chains[name] = [_chain(secrets[name], name, number) for number in range(CONTEXTS)]
            for keys in chains[name]:
                contexts[name].save(keys)
                assert contexts[name].read(keys) == CONTEXT_BLOCKS
        with order.target(store) as address, contextlib.closing(Target(address)) as target:
            yield _Room(store, contexts, chains, target)


def _chain(secret: bytes, name: str, number: int) -> list[bytes]:
    """Return the keys of a context; the first few have the same tokens in every domain."""
    owner = "all" if number < SHARED_CONTEXTS else name
    seed = int.from_bytes(hashlib.blake2b(f"{owner}/{number}".encode()).digest()[:8])
    chain = Chain(secret, FINGERPRINT, BLOCK_TOKENS)
    chain.extend(np.random.default_rng(seed).integers(0, 50_000, CONTEXT_BLOCKS * BLOCK_TOKENS))
    return chain.keys


def _across(room: _Room, order: Order) -> Tally:
    """Ask for what another domain holds; now and then for one's own, which must be there."""
    tally = Tally("forged.domains", "tries")
    for number, dice in enumerate(order.rounds(tally)):
        mine, theirs = dice.sample(DOMAINS, 2)
        keys = [_name(room, theirs, dice) for _ in range(ASKED_AT_ONCE)]
        world, how = _world(room, mine, theirs, dice)
        hits = room.store.held(world, keys).count(1)
        if not number % _FETCH_EVERY:
            came, asked = _fetched(room, world, keys)
            hits += came
            tally.tried += asked
            own = room.chains[mine][number % CONTEXTS]
            right = room.contexts[mine].read(own) == CONTEXT_BLOCKS
            tally.expect(right, f"round {number}: {mine} does not get its own")
            tally.counts["own contexts read"] += 1
        tally.tried += len(keys)
        tally.counts[how] += len(keys)
        tally.expect(not hits, f"round {number}: {mine} hits {hits} blocks of {theirs}: {how}")
    return tally


def _name(room: _Room, theirs: str, dice: random.Random) -> bytes:
    """Return a name of another domain's block, or nearly one, or none."""
    key = dice.choice(dice.choice(room.chains[theirs]))
    match dice.randrange(4):
        case 0:
            at = dice.randrange(len(key))
            return key[:at] + bytes([key[at] ^ 1 << dice.randrange(8)]) + key[at + 1 :]
        case 1:
            return dice.randbytes(len(key))
        case _:
            return key


def _world(room: _Room, mine: str, theirs: str, dice: random.Random) -> tuple[World, str]:
    """Return a world in which nothing of theirs may be found, and what is wrong with it."""
    own, other = room.contexts[mine].world, room.contexts[theirs].world
    match dice.randrange(6):
        case 0:
            return other._replace(fingerprint=dice.randbytes(16)), "another fingerprint"
        case 1:
            return other._replace(payload_bytes=other.payload_bytes - 1), "another length"
        case 2:
            return other._replace(block_tokens=2 * other.block_tokens), "another block size"
        case 3:
            return other._replace(domain=dice.randbytes(16)), "a domain made up"
        case _:
            return own, "another domain's names"


def _fetched(room: _Room, world: World, keys: list[bytes]) -> tuple[int, int]:
    """Fetch here, then ask and get over TCP; return the blocks that came, and the names asked for.

    A fetch and a get end with the first name that is not there.
    """
    fetched = room.store.fetch(world, keys, 1.0)
    room.store.release(fetched.lease)
    held = room.target.exist(world, keys, 5.0).held.count(1)
    into = [aligned_buffer(world.record_bytes) for _ in keys[:4]]
    got = room.target.get(world, keys[: len(into)], into, 5.0).blocks
    asked = min(len(fetched.places) + 1, len(keys)) + len(keys) + min(got + 1, len(into))
    return len(fetched.places) + held + got, asked


def _fingerprints(store: Store) -> Tally:
    """Save under one fingerprint; look under every other that differs in one field."""
    tally = Tally("forged.fingerprints", "mutations")
    layout = Layout.portable(layers=2, kv_heads=2, head_size=16, dtype="bfloat16", block_tokens=16)
    right = Fingerprint("model", layout, '{"rope": 1}', "none", "none")
    tokens = np.arange(10 * layout.block_tokens)
    store.session(right, "acme").save(tokens, np.zeros((10, layout.payload_bytes), np.uint8))
    tally.expect(store.session(right, "acme").cover(tokens) == len(tokens), "nothing to be found")
    for path, wrong in _mutations(right):
        tally.tried += 1
        tally.expect(wrong.digest() != right.digest(), f"{path} is not part of the digest")
        found = store.session(wrong, "acme").cover(tokens)
        tally.expect(not found, f"{path} differs, and {found} tokens are covered")
        tally.counts[path] += 1
    return tally


def _mutations(right: Fingerprint) -> Iterator[tuple[str, Fingerprint]]:
    """Yield every fingerprint that differs in one field and is possible."""

    def changed(value: msgspec.Struct) -> Iterator[tuple[str, Any]]:
        for field in value.__struct_fields__:
            old = getattr(value, field)
            inner = changed(old) if isinstance(old, msgspec.Struct) else _others(old)
            for path, new in inner:
                with contextlib.suppress(BlockError):  # impossible, and refused as such
                    yield f"{field}{path}", msgspec.structs.replace(value, **{field: new})

    yield from changed(right)


def _others(old: object) -> Iterator[tuple[str, Any]]:
    if isinstance(old, int):
        yield from (("", old + step) for step in (1, 16, -1))
    else:
        yield from (("", new) for new in (f"{old}x", str(old).upper(), f" {old}"))


class _Shown(NamedTuple):
    """A token as somebody shows it: claims, the secret used, over which nonces, and when."""

    text: str
    secret: bytes
    nonces: bytes = _NONCES
    now: float = _NOW


def _tokens(order: Order) -> Tally:
    """Forge tokens, repeat and keep them; the right one is let in for as long as it holds."""
    tally = Tally("forged.tokens", "tries")
    good = token.read(token.issue(_KEY, "node-1", ("read",), TOKEN_S_MAX, _NOW))
    over = good.claims.expires + token.CLOCK_SKEW_S
    kinds: dict[str, Callable[[random.Random], _Shown]] = {
        "other claims": lambda dice: _Shown(_flipped(good.text, dice), good.secret),
        "another secret": lambda dice: _Shown(good.text, _bits(good.secret, dice)),
        "other nonces": lambda dice: _Shown(good.text, good.secret, _bits(_NONCES, dice)),
        "a stranger's": lambda dice: _Shown(_other_claims(dice), good.secret),
        "kept too long": lambda dice: _Shown(good.text, good.secret, now=over + _while(dice)),
        "of too long a life": _too_long,
    }
    for number, dice in enumerate(order.rounds(tally)):
        kind = dice.choice(list(kinds))
        text, secret, nonces, now = kinds[kind](dice)
        proof = token.prove(token.Token(text, good.claims, secret), "peer", nonces)
        side = token.prove(good, "target", _NONCES)
        admitted = _admits(text, proof, now) or _admits(good.text, side, _NOW)
        tally.expect(not admitted, f"round {number}: {kind} token was let in: {text!r}")
        tally.tried += 1
        tally.counts[kind] += 1
    proof = token.prove(good, "peer", _NONCES)
    for now in (_NOW, good.claims.expires - 1.0):
        right = _admits(good.text, proof, now)
        tally.expect(right, f"the right token is not let in at {now:.0f}: the others tell nothing")
    return tally


def _admits(text: str, proof: bytes, now: float) -> bool:
    try:
        return token.proves(token.check(_KEY, text, now), "peer", _NONCES, proof)
    except RefusedError:
        return False


def _too_long(dice: random.Random) -> _Shown:
    """Return a token that holders of the key made for longer than any may live."""
    ahead_s = token.CLOCK_SKEW_S + 1 + _while(dice)
    made = token.read(token.issue(_KEY, "node-1", ("read",), TOKEN_S_MAX, _NOW + ahead_s))
    return _Shown(made.text, made.secret)


def _while(dice: random.Random) -> float:
    """Return a time, in seconds: none, a moment, or up to years."""
    return dice.choice((0.0, dice.random(), 10 ** dice.uniform(0, 8)))


def _bits(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]


def _flipped(text: str, dice: random.Random) -> str:
    at = dice.randrange(len(text))
    other = dice.choice("ABCDEFabcdef0123-_=. \u20ac".replace(text[at], ""))
    return text[:at] + other + text[at + 1 :]


def _other_claims(dice: random.Random) -> str:
    """Return the claims of a token for more, or for longer, that somebody else made."""
    may: tuple[token.Verb, ...] = dice.choice((("read", "write"), ("read", "write", "delete")))
    stranger = token.issue(dice.randbytes(32), "node-1", may, TOKEN_S_MAX, _NOW)
    return token.read(stranger).text
