"""A store over memory that rots, and over memory alone, against a set."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from holdfast.blocks.envelope import HEADER_BYTES, SEAL_AES_GCM, read_header
from holdfast.keys.keyring import KeyRing
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.stateful import StoreMachine

KIB = 1 << 10
SECRET = {"default": b"s" * 32, "other": b"o" * 32}


class HostOnly(StoreMachine):
    """Nothing below the host: a restart forgets everything."""

    def open(self) -> Store:
        return Store(128 * KIB, [], SECRET)


class OverRottingMemory(StoreMachine):
    """A tier whose records flip, shrink, swap places and vanish."""

    def __init__(self) -> None:
        self.records: dict = {}
        super().__init__()

    def open(self) -> Store:
        return self.over_records(None)

    def over_records(self, ring: KeyRing | None) -> Store:
        """Open a store over the records, sealed with a ring if one is given."""
        tier = MemoryTier(400 * KIB, self.records)
        return Store(128 * KIB, [tier], SECRET, StoreOptions(ring=ring))

    def disturb(self, seed: int) -> None:
        rng = random.Random(seed)
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

    @rule(bring_back=st.booleans())
    def erase(self, bring_back: bool) -> None:
        """Erase the domain, and perhaps put back what lay below, as from a backup."""
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


TestHostOnly = HostOnly.TestCase
TestHostOnly.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestOverRottingMemory = OverRottingMemory.TestCase
TestOverRottingMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSealed = SealedOverRottingMemory.TestCase
TestSealed.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
