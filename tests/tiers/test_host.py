"""The host tier allocates slots in shared memory; one budget bounds all domains together."""

import itertools
import math
import mmap
import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import ProtocolError
from holdfast.tiers.arena import Arena, PrivateArena
from holdfast.tiers.base import NOWHERE, Place
from holdfast.tiers.chunks import AHEAD_CHUNKS, HostBudget
from holdfast.tiers.host import NAMELESS, HostTier

MIB = 1 << 20
RECORD = 64 << 10


def fill(tier: HostTier, size: int) -> list[Place]:
    places = []
    while (place := tier.reserve([size]).places[0]) != NOWHERE:
        places.append(place)
    return places


@pytest.fixture(params=[Arena, PrivateArena])
def either(request):
    """A tier in shared memory, then one in private memory."""
    tier = HostTier(HostBudget(4 * MIB), request.param(4 * MIB))
    yield tier
    tier.close()


@pytest.fixture
def tier():
    tier = HostTier(HostBudget(4 * MIB))
    yield tier
    tier.close()


def test_slots_never_overlap_or_exceed_the_capacity(tier: HostTier) -> None:
    places = sorted(fill(tier, RECORD))
    assert len(places) == tier.slots(RECORD) == 4 * MIB // RECORD
    assert all(b - a >= RECORD for a, b in itertools.pairwise(places))
    assert tier.usage().used_bytes == 4 * MIB


class RecordingAgent:
    """Records which memory is registered, and its first byte when that ended."""

    def __init__(self) -> None:
        self.works = True
        self.registered: list[memoryview] = []
        self.first_bytes: list[int] = []

    def register(self, memory: memoryview) -> object:
        if not self.works:
            raise ProtocolError("RLIMIT_MEMLOCK is 64 KiB")
        self.registered.append(memory)
        return memory

    def deregister(self, registration: object) -> None:
        assert isinstance(registration, memoryview)
        if not self.works:
            raise ProtocolError("the device is gone")
        self.first_bytes.append(registration[0])
        self.registered.remove(registration)

    def covers(self, part: memoryview) -> bool:
        start, end = address_of(part), address_of(part) + len(part)
        return any(
            address_of(memory) <= start and end <= address_of(memory) + len(memory)
            for memory in self.registered
        )


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def test_the_runs_of_transferred_slots_are_registered_until_they_close(either: HostTier) -> None:
    agent, big = RecordingAgent(), 256 << 10
    small_places, big_places = (either.reserve([size, size]).places for size in (RECORD, big))
    either.register(big_places, agent)
    assert len(agent.registered) == 1
    assert all(agent.covers(either.view(place, big)) for place in big_places)
    assert not agent.covers(either.view(small_places[0], RECORD))
    either.view(big_places[0], big)[:] = b"x" * big
    either.free(big_places)
    assert agent.first_bytes == [ord("x")]  # the registration ended before the memory went back
    again = either.reserve([big]).places
    either.register([*small_places, *again], agent)
    assert agent.covers(either.view(again[0], big))
    either.close()
    assert agent.registered == []


def test_a_run_that_cannot_be_registered_serves_its_slots(tier: HostTier) -> None:
    agent = RecordingAgent()
    agent.works = False
    places = fill(tier, RECORD)
    with pytest.raises(ProtocolError, match="RLIMIT_MEMLOCK is 64 KiB"):
        tier.register(places, agent)
    tier.free(places)
    assert tier.usage().used_bytes == 0
    assert len(fill(tier, MIB)) == 4


def test_a_run_that_cannot_be_deregistered_keeps_its_memory_and_serves_its_slots(
    tier: HostTier, caplog: pytest.LogCaptureFixture
) -> None:
    agent, places = RecordingAgent(), fill(tier, MIB)
    tier.register(places, agent)
    agent.works = False
    tier.free(places)
    assert "a run of host memory stays in use: the device is gone" in caplog.text
    assert tier.reserve([RECORD]).places == [NOWHERE]
    assert len(fill(tier, MIB)) == 4
    agent.works = True


@pytest.mark.parametrize("size", [4096, 12 << 10, 100 << 10, 300 << 10, MIB, 3 * MIB])
def test_every_size_gets_the_number_of_slots_that_slots_returns(tier: HostTier, size: int) -> None:
    assert len(fill(tier, size)) == tier.slots(size) > 0


def test_a_record_larger_than_the_arena_has_no_place(tier: HostTier) -> None:
    assert tier.slots(5 * MIB) == 0
    assert tier.reserve([5 * MIB]).places == [NOWHERE]


def test_freed_slots_serve_another_size(tier: HostTier) -> None:
    tier.free(fill(tier, RECORD))
    assert tier.usage().used_bytes == 0
    assert len(fill(tier, MIB)) == tier.slots(MIB)


def test_domains_share_one_budget_and_no_memory() -> None:
    budget = HostBudget(4 * MIB)
    one, other = HostTier(budget), HostTier(budget)
    places = fill(one, MIB)
    assert other.reserve([MIB]).places == [NOWHERE]
    one.view(places[0], 4)[:] = b"mine"
    one.free(places)
    (place,) = other.reserve([MIB]).places
    assert bytes(other.view(place, MIB)) == bytes(MIB)


def test_released_memory_reads_as_zeros(either: HostTier) -> None:
    tier = either
    tier.prefault()
    (place,) = tier.reserve([MIB]).places
    tier.view(place, MIB)[:] = b"x" * MIB
    tier.free([place])
    assert bytes(tier.arena.view[place : place + MIB]) == bytes(MIB)


def test_no_arena_goes_into_a_core_dump(either: HostTier) -> None:
    start = np.frombuffer(either.arena.view, np.uint8).ctypes.data
    mapped, flags = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            mapped = int(found[1], 16) <= start < int(found[2], 16)
        elif mapped and line.startswith("VmFlags:"):
            flags = line.split()
    assert "dd" in flags


def test_a_mapping_of_the_descriptor_shows_the_same_bytes(tier: HostTier) -> None:
    (place,) = tier.reserve([RECORD]).places
    tier.view(place, RECORD)[:] = b"a" * RECORD
    with mmap.mmap(os.dup(tier.arena.fd), tier.arena.nbytes) as mapped:
        assert mapped[place : place + RECORD] == b"a" * RECORD


def test_an_arena_cannot_be_shrunk_while_it_is_mapped(tier: HostTier) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(tier.arena.fd, 4096)


def test_prefault_faults_in_the_next_chunks_one_at_a_time(tier: HostTier) -> None:
    chunk = 4 * MIB // 16
    for chunks in range(1, AHEAD_CHUNKS + 1):
        assert tier.prefault()
        assert resident(tier) == chunks * chunk
    assert not tier.prefault()
    (place,) = tier.reserve([RECORD]).places
    assert place < chunk
    assert tier.prefault()
    assert resident(tier) == (AHEAD_CHUNKS + 1) * chunk


def test_prefault_faults_in_chunks_in_use_and_changes_no_byte(tier: HostTier) -> None:
    places = fill(tier, RECORD)
    for place in places[::2]:
        tier.view(place, RECORD)[:] = place.to_bytes(8, "little") * (RECORD // 8)
    while tier.prefault():
        pass
    assert resident(tier) == 4 * MIB
    for number, place in enumerate(places):
        sign = bytes(8) if number % 2 else place.to_bytes(8, "little")
        assert bytes(tier.view(place, RECORD)) == sign * (RECORD // 8)
    tier.free(places)
    assert resident(tier) == 0


def test_a_low_limit_of_prefaulted_chunks_leaves_chunks_in_use_alone(tier: HostTier) -> None:
    (place,) = tier.reserve([RECORD]).places
    tier.view(place, 1)[:] = b"x"
    used = resident(tier)
    while tier.prefault(2):
        pass
    assert resident(tier) == used + 2 * 4 * MIB // 16
    tier.reserve([RECORD] * 16)
    assert tier.prefault(2)


def test_reclaim_returns_memory_touched_by_another_process_and_changes_no_slot(
    tier: HostTier,
) -> None:
    (place,) = tier.reserve([RECORD]).places
    tier.view(place, RECORD)[:] = b"x" * RECORD
    assert tier.prefault(), "a free chunk is faulted in ahead of use"
    assert tier.reclaim() == 0
    ours = resident(tier)
    for offset in range(0, 4 * MIB, mmap.PAGESIZE):
        if offset >= MIB:
            tier.arena.view[offset] = 1
    assert resident(tier) == ours + 3 * MIB == tier.resident_bytes()
    assert tier.reclaim() > 0
    assert resident(tier) == ours
    assert tier.reclaim() == 0
    assert bytes(tier.view(place, RECORD)) == b"x" * RECORD
    tier.close()
    assert (tier.reclaim(), tier.resident_bytes()) == (0, 0)


def test_prefaulted_memory_of_one_arena_is_returned_when_another_needs_it() -> None:
    budget = HostBudget(4 * MIB)
    idle, busy = HostTier(budget), HostTier(budget)
    while idle.prefault():
        pass
    assert resident(idle) == budget.chunk_bytes * AHEAD_CHUNKS // 2
    for place in fill(busy, RECORD):
        busy.view(place, 1)[:] = b"x"
    while idle.prefault() or busy.prefault():
        pass
    assert resident(idle) + resident(busy) == 4 * MIB
    assert budget.prefaulted_chunks == 0


def test_an_arena_is_on_huge_pages_if_the_kernel_supports_them() -> None:
    tier = HostTier(HostBudget(64 * MIB))
    for place in tier.reserve([MIB] * 24).places[::3]:
        tier.view(place, MIB)[:] = b"y" * MIB
    while tier.prefault():
        pass
    huge = mapped_huge(tier)
    if not huge:
        pytest.skip("this kernel collapses no shared memory")
    assert huge >= 32 * MIB
    assert bytes(tier.view(Place(0), MIB)) == b"y" * MIB


def test_a_run_lists_the_names_of_its_slots_once_all_in_use_have_one(tier: HostTier) -> None:
    per_run = 8
    places = tier.reserve([RECORD] * (per_run + 1)).places
    for number, place in enumerate(places[:-1]):
        assert tier.beside(places[0]) == []
        tier.name_slots([place], [number])
    assert sorted(tier.beside(places[0])) == list(range(per_run))
    assert tier.beside(places[-1]) == []
    tier.name_slots([places[3]], [NAMELESS])
    assert tier.beside(places[0]) == []
    tier.free([places[3], places[5]])
    assert sorted(tier.beside(places[0])) == [n for n in range(per_run) if n not in (3, 5)]
    again = tier.reserve([RECORD]).places[0]
    assert again in (places[3], places[5])
    assert tier.beside(places[0]) == []


def test_the_slot_freed_last_is_allocated_first(tier: HostTier) -> None:
    places = fill(tier, RECORD)
    tier.free([places[3], places[20], places[5]])
    assert tier.reserve([RECORD]).places == [places[5]]
    assert sorted(tier.reserve([RECORD] * 3).places) == [NOWHERE, places[3], places[20]]
    assert tier.usage().used_bytes == 4 * MIB


def test_the_time_to_free_a_slot_does_not_grow_with_their_number_or_order() -> None:
    class NoMemory:
        view = memoryview(b"")

        def populate(self, offset: int, nbytes: int) -> None: ...
        def give_back(self, offset: int, nbytes: int) -> None: ...
        def close(self) -> None: ...

    tier = HostTier(HostBudget(64 << 30), NoMemory())
    took = [math.inf, math.inf]
    for turn in range(10):
        places = fill(tier, MIB)
        assert len(places) == 64 << 10
        if turn % 2:
            random.Random(turn).shuffle(places)
        begun = time.thread_time()
        tier.free(places)
        took[turn % 2] = min(took[turn % 2], time.thread_time() - begun)
        assert tier.usage().used_bytes == 0
    assert took[1] < 15 * took[0]


def mapped_huge(tier: HostTier) -> int:
    start = np.frombuffer(tier.arena.view, np.uint8).ctypes.data
    found = re.search(
        rf"^{start:x}-.*?^ShmemPmdMapped: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return 1024 * int(found[1]) if found else 0


def resident(tier: HostTier) -> int:
    return os.fstat(tier.arena.fd).st_blocks * 512
