"""A whole store against a dict, under faults and restarts: a Hypothesis state machine.

Subclass `StoreMachine`, say how to open a store over the tiers under test, and run
`Subclass.TestCase`. Two things are held true whatever happens: a byte that is served is the byte
that was saved for this key, and nothing is lost track of (slots, pins, leases).

After the executable reference models of Bornholt et al., "Using Lightweight Formal Methods to
Validate a Key-Value Storage Node in Amazon S3" (SOSP 2021): the model is a set.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.blocks.key import Chain
from holdfast.blocks.world import World
from holdfast.codec.pack import payload
from holdfast.store.store import Store
from holdfast.testing.payloads import payload_of
from holdfast.tiers.base import NOWHERE

CHAINS = 4
CHAIN_BLOCKS = 12
BLOCK_TOKENS = 4
PAYLOAD_BYTES = 5_000
FINGERPRINT = b"stateful-machine"
LONG_S = 60.0

_chains = st.integers(0, CHAINS - 1)
_counts = st.integers(1, CHAIN_BLOCKS)


class StoreMachine(RuleBasedStateMachine):
    """Saves, fetches, faults and restarts in any order; subclasses open the store."""

    def open(self) -> Store:
        """Return a store, not started, over the media this machine's earlier stores left."""
        raise NotImplementedError

    def disturb(self, seed: int) -> None:
        """Do something bad to the media below; the default leaves them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: set[bytes] = set()
        self.leases: list[tuple[int, list[bytes], list[int]]] = []
        self._begin()
        key, _ = self.store.domain("default")
        self.chains = [_chain(key, seed) for seed in range(CHAINS)]

    @rule(number=_chains, stop=_counts)
    def save(self, number: int, stop: int) -> None:
        """Save a prefix of a context."""
        keys = self.chains[number].keys[:stop]
        reserved = self.store.reserve(self.world, keys, FINGERPRINT, 0)
        self._fill(keys, reserved.places)
        self.store.commit(reserved.ticket)
        self.saved.update(keys)

    @rule(number=_chains, stop=_counts, filled=st.integers(0, CHAIN_BLOCKS))
    def save_and_fail(self, number: int, stop: int, filled: int) -> None:
        """Begin to save, fill some slots, give up."""
        keys = self.chains[number].keys[:stop]
        reserved = self.store.reserve(self.world, keys, FINGERPRINT, 0)
        self._fill(keys[:filled], reserved.places[:filled])
        self.store.abort(reserved.ticket)

    @rule(number=_chains, stop=_counts)
    def fetch(self, number: int, stop: int) -> None:
        """Fetch a prefix of a context, check every byte, keep the lease."""
        keys = self.chains[number].keys[:stop]
        fetched = self.store.fetch(self.world, keys, LONG_S)
        self._check(keys, fetched.places)
        self.leases.append((fetched.lease, keys, fetched.places))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 1_000))
    def release(self, pick: int) -> None:
        """End a lease; until now its bytes must not have changed."""
        lease, keys, places = self.leases.pop(pick % len(self.leases))
        self._check(keys, places)
        assert self.store.release(lease)

    @rule(number=_chains, block=st.integers(0, CHAIN_BLOCKS - 1), offset=st.integers(0, 1 << 20))
    def flip_in_arena(self, number: int, block: int, offset: int) -> None:
        """Flip a byte of an unleased block in the host's memory."""
        states = self.store.states
        with states.lock:
            row = states.index.find(self.chains[number].keys[block])
            if row < 0 or states.index.leases[row] or states.index.places[0][row] == NOWHERE:
                return
            sealed_bytes = 128 + PAYLOAD_BYTES + 16
            place = states.index.places[0][row]
            self.store.arena(self.world.domain).view[place + offset % sealed_bytes] ^= 0x10

    @rule(seed=st.integers(0, 1 << 32))
    def harm(self, seed: int) -> None:
        """Let the subclass disturb the media."""
        self.disturb(seed)

    @rule()
    def drop(self) -> None:
        """Forget everything."""
        self.store.drop("*")

    @rule()
    def verify(self) -> None:
        """Scrub: afterwards nothing that is indexed may be wrong."""
        self.store.verify()

    @rule()
    def restart(self) -> None:
        """Close the store and open another over the same media."""
        self.leases.clear()
        self.store.close()
        self._begin()

    @invariant()
    def covers_only_what_was_saved(self) -> None:
        """No key is ever held that nobody saved."""
        for chain in self.chains:
            held = self.store.cover(self.world, chain.keys).blocks
            assert self.saved.issuperset(chain.keys[:held])

    @invariant()
    def loses_no_slot(self) -> None:
        """Every slot in use belongs to a block, a ticket or a reader."""
        states = self.store.states
        with states.lock:
            if states.loading:
                return
            places = {p for p in states.index.places[0] if p != NOWHERE}
            places |= {place for left in states.leaving.values() for place in left}
            assert states.host(self.world).usage().records == len(places)

    def teardown(self) -> None:
        """Release everything; then nothing may be left behind."""
        for lease, _, _ in self.leases:
            self.store.release(lease)
        self.store.drop("*")
        self.store.close()
        assert len(self.store.states.index) == 0
        assert self.store.states.host(self.world).usage().records == 0

    def _begin(self) -> None:
        self.store = self.open()
        _, domain = self.store.domain("default")
        self.world = World(FINGERPRINT, domain, PAYLOAD_BYTES, BLOCK_TOKENS)
        self.store.start()
        self.store.recovery.wait()

    def _fill(self, keys: list[bytes], places: list[int]) -> None:
        arena = self.store.arena(self.world.domain).view
        for key, place in zip(keys, places, strict=True):
            if place != NOWHERE:
                payload(arena[place:], PAYLOAD_BYTES)[:] = payload_of(key, PAYLOAD_BYTES)

    def _check(self, keys: list[bytes], places: list[int]) -> None:
        arena = self.store.arena(self.world.domain).view
        for key, place in zip(keys, places, strict=False):
            held = payload(arena[place:], PAYLOAD_BYTES)
            assert bytes(held) == bytes(payload_of(key, PAYLOAD_BYTES)), key.hex()


def _chain(domain_key: bytes, seed: int) -> Chain:
    chain = Chain(domain_key, FINGERPRINT, BLOCK_TOKENS)
    shared = np.zeros(3 * BLOCK_TOKENS, dtype=np.uint32)
    own = np.random.default_rng(seed).integers(1, 1_000, (CHAIN_BLOCKS - 3) * BLOCK_TOKENS)
    chain.extend(np.concatenate([shared, own]))
    return chain
