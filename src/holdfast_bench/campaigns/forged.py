"""Forged campaign: forged, replayed, cross-domain and wrong-fingerprint requests never hit.

Four domains save contexts, some with the same tokens. Then each domain requests the blocks of the
others as an attacker that knows everything but the secrets: by their keys, by keys with one
bit changed, in a namespace with one field changed, in memory and over TCP. Tokens are forged bit by
bit, replayed under other nonces, and used after they expire.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from holdfast.blocks.layout import ExactLayout, Layout, RankSlice
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.errors import BlockError, RefusedError
from holdfast.limits import BLOCK_TOKENS, MIB, TOKEN_S_MAX
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import fingerprint_for
from holdfast.wire.remote import token
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.contexts import Contexts, keys_of
from holdfast_bench.campaigns.loopback import open_target

DOMAINS = ("acme", "birch", "cedar", "default")
CONTEXTS = 8
SHARED_CONTEXTS = 3
CONTEXT_BLOCKS = 8
PAYLOAD_BYTES = 3_000
ASKED_AT_ONCE = 64
HOST_BYTES = 16 * MIB

_FETCH_EVERY = 16
_NOW = 1_000_000.0
_KEY = bytes(range(32))
_NONCES = b"n" * 64


class _Attacked(NamedTuple):
    """A store of several domains, the chains that each has saved, and another node's client."""

    store: Store
    contexts: dict[str, Contexts]
    chains: dict[str, list[list[bytes]]]
    target: TargetClient


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Request across domains, with each field of a fingerprint changed, and with forged tokens."""
    with _attacked() as attacked:
        yield _across(attacked, budget.share(1.25))
        yield _fingerprints(attacked.store)
    yield _tokens(budget.share(5))


@contextlib.contextmanager
def _attacked() -> Iterator[_Attacked]:
    secrets = {name: hashlib.blake2b(name.encode(), digest_size=32).digest() for name in DOMAINS}
    options = StoreOptions(serves_peers=True)
    with Store(HOST_BYTES, [], secrets, options) as store:
        store.start()
        contexts = {name: Contexts(store, PAYLOAD_BYTES, name) for name in DOMAINS}
        chains: dict[str, list[list[bytes]]] = {}
        for name in DOMAINS:
            chains[name] = [_chain(secrets[name], name, number) for number in range(CONTEXTS)]
            for keys in chains[name]:
                contexts[name].save(keys)
                assert contexts[name].read(keys) == CONTEXT_BLOCKS
        with open_target(store) as address, contextlib.closing(TargetClient(address)) as target:
            yield _Attacked(store, contexts, chains, target)


def _chain(secret: bytes, name: str, number: int) -> list[bytes]:
    """Return a context's keys; the first `SHARED_CONTEXTS` have equal tokens in each domain."""
    owner = "all" if number < SHARED_CONTEXTS else name
    seed = int.from_bytes(hashlib.blake2b(f"{owner}/{number}".encode()).digest()[:8])
    tokens = np.random.default_rng(seed).integers(0, 50_000, CONTEXT_BLOCKS * BLOCK_TOKENS)
    return keys_of(secret, tokens)


def _across(attacked: _Attacked, budget: CampaignBudget) -> CampaignResult:
    """Request another domain's blocks; every `_FETCH_EVERY` rounds read an own context, too."""
    result = CampaignResult("forged.domains", "tries")
    for number, rng in enumerate(budget.rounds(result)):
        mine, theirs = rng.sample(DOMAINS, 2)
        keys = [_key(attacked, theirs, rng) for _ in range(ASKED_AT_ONCE)]
        namespace, how = _namespace(attacked, mine, theirs, rng)
        hits = attacked.store.held(namespace, keys).count(1)
        if not number % _FETCH_EVERY:
            fetched, asked = _fetched(attacked, namespace, keys)
            hits += fetched
            result.tried += asked
            own = attacked.chains[mine][number % CONTEXTS]
            right = attacked.contexts[mine].read(own) == CONTEXT_BLOCKS
            result.expect(right, f"round {number}: {mine} cannot read its own context")
            there = attacked.target.exist(attacked.contexts[mine].namespace, own, 30.0)
            shown = there.held == b"\1" * CONTEXT_BLOCKS
            words = f"round {number}: the target does not show {mine} its own context"
            result.expect(shown, f"{words}: {there.outcome}")
            result.counts["own contexts read"] += 1
        result.tried += len(keys)
        result.counts[how] += len(keys)
        result.expect(not hits, f"round {number}: {mine} hits {hits} blocks of {theirs}: {how}")
    return result


def _key(attacked: _Attacked, theirs: str, rng: random.Random) -> bytes:
    """Return a key of another domain's block, such a key with one bit changed, or random bytes."""
    key = rng.choice(rng.choice(attacked.chains[theirs]))
    match rng.randrange(4):
        case 0:
            return _bits(key, rng)
        case 1:
            return rng.randbytes(len(key))
        case _:
            return key


def _namespace(
    attacked: _Attacked, mine: str, theirs: str, rng: random.Random
) -> tuple[Namespace, str]:
    """Return a namespace in which none of their blocks may be found, and what is wrong with it."""
    own, other = attacked.contexts[mine].namespace, attacked.contexts[theirs].namespace
    match rng.randrange(6):
        case 0:
            return other._replace(fingerprint=rng.randbytes(16)), "another fingerprint"
        case 1:
            return other._replace(raw_bytes=other.raw_bytes - 1), "another length"
        case 2:
            return other._replace(block_tokens=2 * other.block_tokens), "another block size"
        case 3:
            return other._replace(domain=rng.randbytes(16)), "a domain made up"
        case _:
            return own, "another domain's names"


def _fetched(attacked: _Attacked, namespace: Namespace, keys: list[bytes]) -> tuple[int, int]:
    """Fetch here, then query and get over TCP; return the blocks received and the keys requested.

    A fetch and a get end at the first key that is not held.
    """
    fetched = attacked.store.fetch(namespace, keys, 1.0)
    attacked.store.release(fetched.lease)
    held = attacked.target.exist(namespace, keys, 30.0).held.count(1)
    into = [aligned_buffer(namespace.slot_bytes) for _ in keys[:4]]
    got = attacked.target.get(namespace, keys[: len(into)], into, 30.0).blocks
    asked = min(len(fetched.places) + 1, len(keys)) + len(keys) + min(got + 1, len(into))
    return len(fetched.places) + held + got, asked


def _fingerprints(store: Store) -> CampaignResult:
    """Save under one fingerprint; look up under every other that differs in one field."""
    result = CampaignResult("forged.fingerprints", "mutations")
    rank = RankSlice(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2)
    exact = ExactLayout(
        "bfloat16", 16, 2, 2, 16, 16, 2048, "packing", "engine", "1.0", "backend", "device", rank
    )
    heads = Layout.portable(layers=2, kv_heads=2, head_size=16, dtype="bfloat16", block_tokens=16)
    for layout in (heads, exact):
        right = fingerprint_for(layout)
        tokens = np.arange(10 * layout.block_tokens)
        session = store.session(right, "acme")
        session.save(tokens, np.zeros((10, layout.raw_bytes), np.uint8))
        result.expect(session.cover(tokens) == len(tokens), "its own tokens are not covered")
        for path, wrong in _mutations(right):
            result.tried += 1
            result.expect(wrong.digest() != right.digest(), f"{path} is not part of the digest")
            found = store.session(wrong, "acme").cover(tokens)
            result.expect(not found, f"{path} differs, and {found} tokens are covered")
            result.counts[path] += 1
    return result


def _mutations(right: object) -> Iterator[tuple[str, Any]]:
    """Yield every valid copy of a value that differs in one field, with the field's path."""
    if isinstance(right, msgspec.Struct):
        for field in right.__struct_fields__:
            for path, new in _mutations(getattr(right, field)):
                with contextlib.suppress(BlockError):  # not a valid value
                    yield (
                        f"{field}.{path}".rstrip("."),
                        msgspec.structs.replace(right, **{field: new}),
                    )
    elif isinstance(right, tuple):
        values = cast("tuple[object, ...]", right)
        for i, value in enumerate(values):
            for path, new in _mutations(value):
                yield path, (*values[:i], new, *values[i + 1 :])
    elif isinstance(right, int):
        yield from (("", right + step) for step in (1, 16, -1))
    else:
        others = {f"{right}x", str(right).upper(), f" {right}"} - {right}
        yield from (("", new) for new in sorted(others))


class _Shown(NamedTuple):
    """A token as a client presents it: claims, the secret and nonces of its proof, and the time."""

    text: str
    secret: bytes
    nonces: bytes = _NONCES
    now: float = _NOW


def _tokens(budget: CampaignBudget) -> CampaignResult:
    """Present forged, replayed and expired tokens; the right token is admitted until it expires."""
    result = CampaignResult("forged.tokens", "tries")
    good = token.read(token.issue(_KEY, "node-1", ("read",), TOKEN_S_MAX, _NOW))
    expired = good.claims.expires + token.CLOCK_SKEW_S
    kinds: dict[str, Callable[[random.Random], _Shown]] = {
        "other claims": lambda rng: _Shown(_flipped(good.text, rng), good.secret),
        "another secret": lambda rng: _Shown(good.text, _bits(good.secret, rng)),
        "other nonces": lambda rng: _Shown(good.text, good.secret, _bits(_NONCES, rng)),
        "a stranger's": lambda rng: _Shown(_other_claims(rng), good.secret),
        "kept too long": lambda rng: _Shown(good.text, good.secret, now=expired + _delay_s(rng)),
        "of too long a life": _too_long,
    }
    for number, rng in enumerate(budget.rounds(result)):
        kind = rng.choice(list(kinds))
        text, secret, nonces, now = kinds[kind](rng)
        proof = token.prove(token.Token(text, good.claims, secret), "peer", nonces)
        side = token.prove(good, "target", _NONCES)
        admitted = _admits(text, proof, now) or _admits(good.text, side, _NOW)
        result.expect(not admitted, f"round {number}: {kind} token was admitted: {text!r}")
        result.tried += 1
        result.counts[kind] += 1
    proof = token.prove(good, "peer", _NONCES)
    for now in (_NOW, good.claims.expires - 1.0):
        right = _admits(good.text, proof, now)
        result.expect(right, f"the right token is not admitted at {now:.0f}")
    return result


def _admits(text: str, proof: bytes, now: float) -> bool:
    try:
        return token.proves(token.check(_KEY, text, now), "peer", _NONCES, proof)
    except RefusedError:
        return False


def _too_long(rng: random.Random) -> _Shown:
    """Return a token signed with the right key for a longer life than tokens may have."""
    ahead_s = token.CLOCK_SKEW_S + 1 + _delay_s(rng)
    made = token.read(token.issue(_KEY, "node-1", ("read",), TOKEN_S_MAX, _NOW + ahead_s))
    return _Shown(made.text, made.secret)


def _delay_s(rng: random.Random) -> float:
    """Return a random delay in seconds: zero, less than one, or up to years."""
    return rng.choice((0.0, rng.random(), 10 ** rng.uniform(0, 8)))


def _bits(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _flipped(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    other = rng.choice("ABCDEFabcdef0123-_=. \u20ac".replace(text[at], ""))
    return text[:at] + other + text[at + 1 :]


def _other_claims(rng: random.Random) -> str:
    """Return the claims of a token with more verbs, signed with another key."""
    may: tuple[token.Verb, ...] = rng.choice((("read", "write"), ("read", "write", "delete")))
    stranger = token.issue(rng.randbytes(32), "node-1", may, TOKEN_S_MAX, _NOW)
    return token.read(stranger).text
