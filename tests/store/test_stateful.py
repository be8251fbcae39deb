"""A store over memory that rots, with and without a codec, and over memory alone, against a set.

Three invariants hold after any operations: every served byte is the byte that was saved for this
key in this domain; what was dropped or erased is not held again, whatever ran beside it; and no
slot, pin or lease is leaked.

After the executable reference models of Bornholt et al., "Using Lightweight Formal Methods to
Validate a Key-Value Storage Node in Amazon S3" (SOSP 2021): the model is a set.
"""

import itertools
import random
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.blocks.envelope import HEADER_BYTES, SEAL_AES_GCM, read_header
from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace
from holdfast.codec.codec import CodecMode
from holdfast.codec.pack import payload
from holdfast.errors import Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.policy.movement import Intake
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import payload_of
from holdfast.testing.store_view import StoreView
from holdfast.tiers.base import NOWHERE

KIB = 1 << 10
SECRET = {"default": b"s" * 32, "other": b"o" * 32}
CHAINS = 4
CHAIN_BLOCKS = 12
BLOCK_TOKENS = 4
PAYLOAD_BYTES = 5_000
FINGERPRINT = b"stateful-machine"
LONG_S = 60.0
"""Deadline of fetches that must not be late."""

_chains = st.integers(0, CHAINS - 1)
_counts = st.integers(1, CHAIN_BLOCKS)
_domains = st.integers(0, 1)


def right_payload(key: bytes) -> bytes:
    """The payload of a block: numbers of two bytes whose high bytes have two random bits."""
    low = np.frombuffer(payload_of(key, PAYLOAD_BYTES // 2), np.uint8)
    return np.stack([low, (low & 3) | 0x3C], axis=1).tobytes()


class Leased(NamedTuple):
    """A lease that the machine holds, and its blocks."""

    lease: int
    namespace: Namespace
    keys: list[bytes]
    places: list[int]


class StoreMachine(RuleBasedStateMachine):
    """Random saves, fetches, faults and restarts; subclasses open the store."""

    codec: ClassVar[CodecMode] = "off"
    """Encodes the records of the tier below."""

    def open(self) -> Store:
        """Return a store, not started, over the same media as this machine's earlier stores."""
        raise NotImplementedError

    def disturb(self, seed: int) -> None:
        """Damage the media of lower tiers; by default, do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: set[tuple[Namespace, bytes]] = set()
        self.leases: list[Leased] = []
        self._begin()
        key, _ = self.store.domain("default")
        self.chains = [Chain(key, FINGERPRINT, BLOCK_TOKENS) for _ in range(CHAINS)]
        for seed, chain in enumerate(self.chains):  # their first three blocks are the same
            shared = np.zeros(3 * BLOCK_TOKENS, dtype=np.uint32)
            own = np.random.default_rng(seed).integers(1, 1_000, (CHAIN_BLOCKS - 3) * BLOCK_TOKENS)
            chain.extend(np.concatenate([shared, own]))

    @rule(domain=_domains, number=_chains, stop=_counts)
    def save(self, domain: int, number: int, stop: int) -> None:
        """Save a prefix of a context; every domain uses the same keys."""
        namespace, keys = self._prefix(domain, number, stop)
        with StoreView(self.store).still():
            reserved = self.store.reserve(namespace, keys, FINGERPRINT, 0)
            held = self.store.held(namespace, keys)
        if reserved.outcome is Outcome.OK:  # a block without a slot must be held in this domain
            assert all(
                place != NOWHERE or there
                for place, there in zip(reserved.places, held, strict=True)
            )
        self._fill(namespace, keys, reserved.places)
        self.store.commit(reserved.ticket)
        self.saved.update((namespace, key) for key in keys)

    @rule(domain=_domains, number=_chains, stop=_counts, filled=st.integers(0, CHAIN_BLOCKS))
    def save_and_fail(self, domain: int, number: int, stop: int, filled: int) -> None:
        """Reserve slots, fill some, and abort."""
        namespace, keys = self._prefix(domain, number, stop)
        reserved = self.store.reserve(namespace, keys, FINGERPRINT, 0)
        self._fill(namespace, keys[:filled], reserved.places[:filled])
        self.store.abort(reserved.ticket)

    @rule(domain=_domains, number=_chains, stop=_counts)
    def fetch(self, domain: int, number: int, stop: int) -> None:
        """Fetch a prefix of a context, check every byte, and keep the lease."""
        namespace, keys = self._prefix(domain, number, stop)
        fetched = self.store.fetch(namespace, keys, LONG_S)
        self._check(namespace, keys, fetched.places)
        self.leases.append(Leased(fetched.lease, namespace, keys, fetched.places))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 1_000))
    def release(self, pick: int) -> None:
        """Check the bytes of a lease again, and release it."""
        lease, namespace, keys, places = self.leases.pop(pick % len(self.leases))
        self._check(namespace, keys, places)
        assert self.store.release(lease)

    @rule(
        domain=_domains,
        number=_chains,
        block=st.integers(0, CHAIN_BLOCKS - 1),
        offset=st.integers(0, 1 << 20),
    )
    def flip_in_arena(self, domain: int, number: int, block: int, offset: int) -> None:
        """Flip a byte of an unleased block in the host's memory."""
        namespace = self.namespaces[domain % len(self.namespaces)]
        view, key = StoreView(self.store), self.chains[number].keys[block]
        with view.still():
            if view.copy(namespace, key) is None or view.is_in_use(namespace, key):
                return
            sealed_bytes = 128 + PAYLOAD_BYTES + 16
            view.record(namespace, key)[offset % sealed_bytes] ^= 0x10

    @rule(domain=_domains, number=_chains, stop=_counts)
    def forget(self, domain: int, number: int, stop: int) -> None:
        """Forget blocks of one domain; other domains keep theirs."""
        namespace, keys = self._prefix(domain, number, stop)
        others = [other for other in self.namespaces if other != namespace]
        before = [self.store.held(other, keys) for other in others]
        self.store.forget(namespace, keys)
        assert not any(self.store.held(namespace, keys))
        # With lower tiers, a damaged copy may be found at any time.
        if len(self.store.tier_names()) == 1:
            assert [self.store.held(other, keys) for other in others] == before

    @rule(seed=st.integers(0, 1 << 32))
    def harm(self, seed: int) -> None:
        self.disturb(seed)

    @rule()
    def drop(self) -> None:
        self._drop()

    @rule()
    def verify(self) -> None:
        """Verify all stored blocks, so that no indexed block is wrong afterwards."""
        self.store.verify()

    @rule(drops=st.booleans(), again=st.booleans())
    def restart(self, drops: bool, again: bool) -> None:
        """Close the store and open another over the same media; perhaps drop while it recovers.

        `again`: close that one too, before its recovery has ended.
        """
        self.leases.clear()
        self.store.close()
        self._open()
        if drops:
            self._drop()
        if again:
            self.store.close()
            self._open()
        self.store.recovery.wait()

    @invariant()
    def covers_only_what_was_saved(self) -> None:
        """No key is ever held in a domain that did not save it."""
        for namespace, chain in itertools.product(self.namespaces, self.chains):
            held = self.store.cover(namespace, chain.keys).blocks
            assert self.saved.issuperset((namespace, key) for key in chain.keys[:held])

    @invariant()
    def loses_no_slot(self) -> None:
        """Every used slot belongs to a block, or is pending free."""
        view = StoreView(self.store)
        with view.still():
            if view.reading:
                return
            for namespace in self.namespaces:
                held = len({copy.place for copy in view.copies(0, namespace)})
                assert view.used_slots(namespace) == held + view.retained_slots(namespace)

    def teardown(self) -> None:
        """Release everything, and check that no block and no slot remains."""
        for leased in self.leases:
            self.store.release(leased.lease)
        self.store.drop("*")
        self.store.close()
        view = StoreView(self.store)
        assert (view.entries, view.used_slots()) == (0, 0)

    def _drop(self) -> None:
        """Drop everything; leases stay valid until they are released."""
        self.store.drop("*")
        self.saved.clear()

    def _begin(self) -> None:
        self._open()
        self.store.recovery.wait()

    def _open(self) -> None:
        self.store = self.open()
        self.namespaces = [
            Namespace(FINGERPRINT, domain, PAYLOAD_BYTES, BLOCK_TOKENS)
            for domain in self.store.domain_ids.values()
        ]
        for namespace in self.namespaces:
            self.store.note_element_bytes(namespace, 2)
        self.store.start()

    def _prefix(self, domain: int, number: int, stop: int) -> tuple[Namespace, list[bytes]]:
        """Return a domain's namespace and the first keys of a chain."""
        return self.namespaces[domain % len(self.namespaces)], self.chains[number].keys[:stop]

    def _fill(self, namespace: Namespace, keys: list[bytes], places: list[int]) -> None:
        arena = self.store.arena(namespace.domain).view
        for key, place in zip(keys, places, strict=True):
            if place != NOWHERE:
                payload(arena[place:], PAYLOAD_BYTES)[:] = right_payload(key + namespace.domain)

    def _check(self, namespace: Namespace, keys: list[bytes], places: list[int]) -> None:
        arena = self.store.arena(namespace.domain).view
        for key, place in zip(keys, places, strict=False):
            held = payload(arena[place:], PAYLOAD_BYTES)
            assert bytes(held) == right_payload(key + namespace.domain), key.hex()


class HostOnly(StoreMachine):
    """Nothing below the host: a restart forgets everything."""

    def open(self) -> Store:
        return Store(128 * KIB, [], SECRET)


class HeldTier(MemoryTier):
    """A tier whose reads wait at their end while it is held."""

    def __init__(self, capacity_bytes: int, records: dict) -> None:
        super().__init__(capacity_bytes, records)
        self.waiting, self._may_end = threading.Event(), threading.Event()
        self._may_end.set()

    def hold(self) -> None:
        self.waiting.clear()
        self._may_end.clear()

    def let_go(self) -> None:
        self._may_end.set()

    def read(self, batch):
        found = super().read(batch)
        self.waiting.set()
        self._may_end.wait(LONG_S)
        return found


class OverRottingMemory(StoreMachine):
    """A tier whose records flip, shrink, swap places and vanish."""

    def __init__(self) -> None:
        self.records: dict = {}
        self.folder = Path(tempfile.mkdtemp())
        super().__init__()

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)

    @rule(domain=_domains, number=_chains, saves=st.booleans())
    def drop_beside_a_fetch(self, domain: int, number: int, saves: bool) -> None:
        """Drop everything while a fetch reads from the tier; perhaps save anew meanwhile."""
        namespace, keys = self._prefix(domain, number, CHAIN_BLOCKS)
        with ThreadPoolExecutor(1) as thread:
            self.tier.hold()
            fetching = thread.submit(self.store.fetch, namespace, keys, LONG_S)
            while not (self.tier.waiting.wait(0.001) or fetching.done()):
                pass
            self._drop()
            if saves:
                self.save(domain, number, CHAIN_BLOCKS)
            self.tier.let_go()
            fetched = fetching.result()
        self._check(namespace, keys, fetched.places)
        self.leases.append(Leased(fetched.lease, namespace, keys, fetched.places))

    def open(self) -> Store:
        return self.over_records(None)

    def over_records(self, ring: KeyRing | None) -> Store:
        """Open a store over the records, sealed with a ring if one is given."""
        self.tier = HeldTier(400 * KIB, self.records)
        rules = {1: TierRules(codec=self.codec)}
        options = StoreOptions(ring=ring, drops_file=self.folder / "drops.json", rules=rules)
        return Store(128 * KIB, [self.tier], SECRET, options)

    def disturb(self, seed: int) -> None:
        with self.tier._lock:  # the store's writer adds and drops records at the same time
            self._damage(random.Random(seed))

    def _damage(self, rng: random.Random) -> None:
        places = sorted(self.records)
        if not places:
            return
        place, other = rng.choice(places), rng.choice(places)
        record = bytearray(self.records[place])
        match rng.randrange(4):
            case 0 if record:
                record[rng.randrange(min(len(record), 128 + 5_000 + 16))] ^= 1 << rng.randrange(8)
                self.records[place] = bytes(record)
            case 1:
                self.records[place] = bytes(record[: rng.randrange(len(record) + 1)])
            case 2:
                self.records[place], self.records[other] = self.records[other], bytes(record)
            case 3:
                del self.records[place]


class SealedOverRottingMemory(OverRottingMemory):
    """Sealed, with data keys that come and go; what was erased is never read again."""

    def __init__(self) -> None:
        self.ring = KeyRing(None)
        for name, secret in SECRET.items():
            self.ring.enrol(name, secret)
        super().__init__()

    def open(self) -> Store:
        return self.over_records(self.ring)

    @rule()
    def rotate(self) -> None:
        """Begin another epoch."""
        self.store.rotate("default")

    @rule()
    def retire(self) -> None:
        """Drop the data keys of older epochs."""
        self.store.retire("default", allow_loss=True)

    def _has_only_held_records(self) -> bool:
        return set(self.records) <= {copy.place for copy in StoreView(self.store).copies(1)}

    @rule(bring_back=st.booleans())
    def erase(self, bring_back: bool) -> None:
        """Erase the domain, and perhaps put back what lay below, as from a backup."""
        # A backup has no block that was dropped: its write has ended, and its place is freed, which
        # a tier of another package does on a thread of its own.
        view = StoreView(self.store)
        view.wait_until_written()
        view.wait_until(self._has_only_held_records, "the places of dropped blocks are freed")
        image = dict(self.records)
        self.store.erase("default")
        erased, kept = self.namespaces
        for leased in self.leases:
            if leased.namespace == erased:
                assert not self.store.release(leased.lease) or not leased.places
        self.leases = [leased for leased in self.leases if leased.namespace == kept]
        self.saved = {(namespace, key) for namespace, key in self.saved if namespace == kept}
        if bring_back:
            self.leases.clear()
            self.store.close()
            self.records.update(image)
            self._begin()

    @invariant()
    def nothing_below_is_plain(self) -> None:
        """What lies below the host shows no payload."""
        for record in list(self.records.values())[:2]:
            header = read_header(record)[0] if len(record) >= HEADER_BYTES else None
            assert header is None or header.seal == SEAL_AES_GCM


class EncodedOverRottingMemory(OverRottingMemory):
    """Records are encoded, and take half of their slots below."""

    codec = "planes"

    @invariant()
    def counts_stored_bytes(self) -> None:
        """The domains' usage is the size of the records in their places, once nothing moves."""
        view = StoreView(self.store)
        with view.still():
            if view.writing() or view.reading:
                return
            assert view.used_bytes(1) == sum(copy.nbytes for copy in view.copies(1))


class SealedAndEncoded(SealedOverRottingMemory):
    """Records are encoded, and then sealed."""

    codec = "planes"


class SealedOverTwoTiers(SealedOverRottingMemory):
    """Two tiers that rot: what the near one evicts moves to the far one, and comes up on a use."""

    codec = "planes"

    def __init__(self) -> None:
        self.far_records: dict = {}
        super().__init__()

    def over_records(self, ring: KeyRing | None) -> Store:
        self.tier = HeldTier(100 * KIB, self.records)
        self.far = MemoryTier(300 * KIB, self.far_records, name="far")
        rules = {
            1: TierRules(intake=Intake(fetched="always")),  # so its records are raw
            2: TierRules(codec=self.codec, intake=Intake(saves=False, evicted="always")),
        }
        options = StoreOptions(ring=ring, drops_file=self.folder / "drops.json", rules=rules)
        return Store(128 * KIB, [self.tier, self.far], SECRET, options)

    @rule(domain=_domains, number=_chains, stop=_counts)
    def demote(self, domain: int, number: int, stop: int) -> None:
        """Move what the near tier has of a context to the far one, as if it were a candidate."""
        namespace, keys = self._prefix(domain, number, stop)
        table = self.store.table
        with table.lock:
            for row in table.index.find_all(namespace, keys):
                if row >= 0 and table.is_on(row, 1):
                    table.movement.demote(row, 1)
        self.store.mover.wake()

    @rule(domain=_domains, number=_chains)
    def drop_beside_moves(self, domain: int, number: int) -> None:
        """Drop everything while moves read from the near tier."""
        self.tier.hold()
        self.demote(domain, number, CHAIN_BLOCKS)
        self.tier.waiting.wait(0.01)
        self._drop()
        self.tier.let_go()

    @rule(seed=st.integers(0, 1 << 32))
    def harm_far(self, seed: int) -> None:
        """Damage a record of the far tier."""
        with self.far._lock:
            near, self.records = self.records, self.far_records
            try:
                self._damage(random.Random(seed))
            finally:
                self.records = near

    @invariant()
    def nothing_on_the_far_tier_is_plain(self) -> None:
        for record in list(self.far_records.values())[:2]:
            header = read_header(record)[0] if len(record) >= HEADER_BYTES else None
            assert header is None or header.seal == SEAL_AES_GCM


TestHostOnly = HostOnly.TestCase
TestHostOnly.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestOverRottingMemory = OverRottingMemory.TestCase
TestOverRottingMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSealed = SealedOverRottingMemory.TestCase
TestSealed.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEncoded = EncodedOverRottingMemory.TestCase
TestEncoded.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSealedAndEncoded = SealedAndEncoded.TestCase
TestSealedAndEncoded.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestSealedOverTwoTiers = SealedOverTwoTiers.TestCase
TestSealedOverTwoTiers.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
