"""The contract holds for the host tier, and notices a tier that breaks any of its promises."""

import inspect
import itertools

import msgspec
import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import namespace_of
from holdfast.testing.tier_contract import SIZES, TierContract
from holdfast.tiers.base import NOWHERE, DroppedBlock, ReservedPlaces, TierUsage
from holdfast.tiers.chunks import HostBudget
from holdfast.tiers.host import HostTier


class CopyingHost(HostTier):
    """A host tier whose records are copied to and from its slots."""

    def write(self, batch):
        outcomes = [self._outcome(put.place, absent=Outcome.GONE) for put in batch]
        for number, put in enumerate(batch):
            if outcomes[number] is not Outcome.OK:
                continue
            if len(put.record) != self._run_of(put.place).slot_bytes:
                self.free([put.place])
                outcomes[number] = Outcome.CORRUPT
                continue
            self.view(put.place, len(put.record))[:] = put.record
        return outcomes

    def read(self, batch):
        outcomes = [self._outcome(get.place, absent=Outcome.MISS) for get in batch]
        for number, get in enumerate(batch):
            if outcomes[number] is not Outcome.OK:
                continue
            with self._lock:
                live = get.place in self._live
                nbytes = self._run_of(get.place).slot_bytes if live else 0
            if not live or nbytes > len(get.into):
                outcomes[number] = Outcome.MISS
                continue
            get.into[:nbytes] = self.view(get.place, nbytes)
        return outcomes

    def survivors(self):
        return iter(())

    def _outcome(self, place, absent):
        if self._closed:
            return Outcome.GONE
        return Outcome.OK if place in self._live else absent


class TestHostTier(TierContract):
    def make_tier(self, folder, capacity_bytes):
        return CopyingHost(HostBudget(capacity_bytes))


class TestMemoryTier(TierContract):
    def make_tier(self, folder, capacity_bytes):
        return MemoryTier(capacity_bytes)


class Wrapped:
    """A host tier behind a class that a broken tier overrides one promise of."""

    def __init__(self, capacity_bytes):
        self.inner = CopyingHost(HostBudget(capacity_bytes))
        self.name = "broken"

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Forgetful(Wrapped):
    def write(self, batch):
        return [Outcome.OK] * len(batch)


class Misdirecting(Wrapped):
    def read(self, batch):
        places = [get.place for get in batch]
        return self.inner.read(
            [
                get._replace(place=place)
                for get, place in zip(batch, places[1:] + places[:1], strict=True)
            ]
        )


class Scribbling(Wrapped):
    def write(self, batch):
        outcomes = self.inner.write(batch)
        for put in batch:
            put.record[200:300] = bytes(100)
        return outcomes


class Keeping(Wrapped):
    """Reads whatever buffer was last written from."""

    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self.kept = {}

    def write(self, batch):
        self.kept |= {put.place: put.record for put in batch}
        return self.inner.write(batch)

    def read(self, batch):
        outcomes = self.inner.read(batch)
        for get in batch:
            if get.place in self.kept and len(get.into) == len(self.kept[get.place]):
                get.into[:] = self.kept[get.place]
        return outcomes


class Boundless(Wrapped):
    def reserve(self, sizes):
        found = self.inner.reserve(sizes)
        fake = itertools.count(1 << 40, 1 << 30)
        return ReservedPlaces([p if p != NOWHERE else next(fake) for p in found.places], [])


class Hoarding(Wrapped):
    def free(self, places):
        pass


class Miscounting(Wrapped):
    def usage(self):
        found = self.inner.usage()
        return TierUsage(found.capacity_bytes, found.used_bytes, found.records + 1)


class Telling(Wrapped):
    """Reports a capacity that no message can hold."""

    def usage(self):
        return msgspec.structs.replace(self.inner.usage(), capacity_bytes=object())


class Inventing(Wrapped):
    def reserve(self, sizes):
        found = self.inner.reserve(sizes)
        return ReservedPlaces(
            found.places,
            [DroppedBlock(bytes(16), found.places[0], namespace_of(1))] if sizes else [],
        )


class Emptying(Wrapped):
    """Frees everything for a size that never fits."""

    def reserve(self, sizes):
        if max(sizes, default=0) > self.inner.usage().capacity_bytes:
            self.inner.free(list(self.inner._live))
        return self.inner.reserve(sizes)


class Undead(Wrapped):
    def close(self):
        pass


class Racing(Wrapped):
    """All reads go through one buffer, without a lock."""

    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self.buffer = aligned_buffer(1 << 20)

    def read(self, batch):
        outcomes = self.inner.read(
            [get._replace(into=self.buffer[: len(get.into)]) for get in batch]
        )
        for get in batch:
            get.into[:] = self.buffer[: len(get.into)]
        return outcomes


def broken_promises(make, durable, tmp_path):
    """The names of the contract's tests that a tier fails."""

    class Contract(TierContract):
        def make_tier(self, folder, capacity_bytes):
            return make(capacity_bytes)

    Contract.durable = durable
    contract, failed = Contract(), set()
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if not name.startswith("test_"):
            continue
        wanted = inspect.signature(test).parameters
        for nbytes in SIZES if "nbytes" in wanted else [0]:
            offered = {"tmp_path": tmp_path, "nbytes": nbytes}
            if "tier" in wanted:
                offered["tier"] = make(contract.capacity_bytes)
            try:
                test(**{parameter: offered[parameter] for parameter in wanted})
            except (AssertionError, KeyError, TypeError):
                failed.add(name)
    return failed


def test_a_correct_tier_breaks_no_promise(tmp_path):
    assert broken_promises(Wrapped, False, tmp_path) == set()


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (Forgetful, "test_what_was_written_is_read"),
        (Misdirecting, "test_what_was_written_is_read"),
        (Scribbling, "test_buffers_stay_the_callers"),
        (Keeping, "test_buffers_stay_the_callers"),
        (Boundless, "test_a_size_it_can_never_hold_gets_nowhere"),
        (Hoarding, "test_a_full_tier_reserves_nowhere_and_freed_places_again"),
        (Miscounting, "test_usage_adds_up"),
        (Telling, "test_what_it_reports_is_shown"),
        (Inventing, "test_what_is_dropped_is_named_and_the_rest_stays"),
        (Emptying, "test_a_size_it_can_never_hold_drops_nothing"),
        (Undead, "test_after_close_everything_is_gone"),
        (Racing, "test_what_was_written_is_read"),
    ],
)
def test_a_broken_tier_is_noticed(broken, expected, tmp_path):
    assert expected in broken_promises(broken, False, tmp_path)


def test_a_tier_that_only_claims_to_be_durable_is_noticed(tmp_path):
    assert broken_promises(Wrapped, True, tmp_path) == {
        "test_what_survives_is_what_was_written",
        "test_records_of_one_key_in_two_namespaces_survive_both",
        "test_a_survivor_keeps_its_place_until_the_next_is_taken",
    }
