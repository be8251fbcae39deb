"""Hints: what is said of the future changes what stays and what is brought up, and no more."""

import threading
import time
from queue import SimpleQueue

import pytest

from holdfast.errors import BlockError
from holdfast.fairness.fair_queue import WorkItem
from holdfast.plan.prestage import PrestageTimes
from holdfast.policy.base import NEVER
from holdfast.policy.cost_aware import CostAware
from holdfast.policy.retention import Retention
from holdfast.store import core, hints
from holdfast.store.pending_hints import WAITING_MAX, NamedChain, PendingPrestage
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_control import leave, leave_all

MIB = 1 << 20


@pytest.fixture
def laddered(harness):
    """A store over a tier, and what its policy was told to expect."""
    return expecting(harness, MemoryTier(64 * MIB))


class RecordingPolicy(CostAware):
    """Notes how many blocks were used, and how many are expected when."""

    def __init__(self):
        super().__init__()
        self.touched, self.expected = [], []

    def touch(self, rows, now_s):
        self.touched.append(len(rows))
        super().touch(rows, now_s)

    def expect(self, rows, at_s):
        self.expected.append((len(rows), at_s))


def expecting(harness, tier, **options):
    policy = RecordingPolicy()
    one = harness(4 * MIB, tier, make_eviction=lambda: policy, **options)
    one.touched, one.expected = policy.touched, policy.expected
    return one


def below_only(one, chain):
    """Take a chain out of memory; the tier below keeps it."""
    one.flush()
    leave(one.store, one.namespace, chain.keys)
    assert in_memory(one, chain) == 0


def in_memory(one, chain):
    return one.view.held(one.namespace, chain.keys)


def until_up(one, chain):
    end = time.monotonic() + 60
    while in_memory(one, chain) < len(chain.keys):
        assert time.monotonic() < end, "nothing was brought up"
        time.sleep(0.01)


def test_returns_and_closed_hints_set_the_expected_use_of_a_sessions_blocks(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 6)
    one.save(chain)
    one.store.follow(one.namespace, "chat-1", chain.keys)
    assert one.store.returns(one.namespace.domain, "chat-1", 30.0) == 6
    assert one.store.closed(one.namespace.domain, "chat-1") == 6
    assert one.expected == [(6, one.clock.now() + 30.0), (6, NEVER)]


def test_hints_for_an_unknown_session_have_no_effect(laddered) -> None:
    one, domain = laddered, laddered.namespace.domain
    assert one.store.closed(domain, "nobody") == 0
    assert one.store.returns(domain, "nobody", 1.0) == 0
    one.store.follow(one.namespace, "chat-1", one.chain(1, 2).keys)
    assert one.store.closed(b"another-domain--", "chat-1") == 0
    assert one.store.closed(domain, "chat-1") == 0, "it was followed, but nothing was saved"
    assert one.expected in ([], [(0, NEVER)])


def test_following_a_prefix_does_not_shorten_a_sessions_chain(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 6)
    one.save(chain)
    one.store.follow(one.namespace, "chat-1", chain.keys)
    one.store.follow(one.namespace, "chat-1", chain.keys[:2])
    assert one.store.closed(one.namespace.domain, "chat-1") == 6


def test_a_returning_sessions_blocks_are_promoted_just_before_it_returns(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    below_only(one, chain)
    one.store.follow(one.namespace, "chat-1", chain.keys)
    one.store.returns(one.namespace.domain, "chat-1", 60.0)
    hints.start_prestages(one.store)
    assert one.store.status().hints.prestaging == 1
    one.clock.advance(59.6)
    hints.start_prestages(one.store)
    until_up(one, chain)
    one.store.background.submit(WorkItem(b""), lambda: None).result()
    assert one.expected[-1] == (8, 60.0), "bringing it up was no use of it"
    assert one.read(chain) == 8


def test_blocks_demoted_after_a_returns_hint_are_promoted_in_time(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    one.store.follow(one.namespace, "chat-1", chain.keys)
    one.store.returns(one.namespace.domain, "chat-1", 60.0)
    below_only(one, chain)
    one.clock.advance(59.6)
    hints.start_prestages(one.store)
    until_up(one, chain)


def test_prestage_promotes_the_held_blocks_and_returns_their_number(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain, 0, 5)
    below_only(one, one.chain(1, 5))
    assert one.store.prestage(one.namespace, chain.keys, 0.0) == 5
    hints.start_prestages(one.store)
    until_up(one, one.chain(1, 5))
    assert one.store.prestage(one.namespace, one.chain(2, 3).keys, 0.0) == 0


def test_a_prestage_is_a_move_to_memory_and_a_fetch_is_none(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    below_only(one, chain)
    assert one.read(chain) == 8
    below_only(one, chain)
    before = {move.reason for move in one.store.status().moves}
    one.store.prestage(one.namespace, chain.keys, 0.0)
    until_up(one, chain)
    [move] = [move for move in one.store.status().moves if move.reason not in before]
    assert (move.source, move.target, move.reason) == ("memory", "host", "prestage")
    assert (move.blocks, move.nbytes) == (8, 8 * one.namespace.slot_bytes)


def test_a_prestage_that_is_due_begins_at_once(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    below_only(one, chain)
    assert one.store.prestage(one.namespace, chain.keys, 0.0) == 8
    until_up(one, chain)


@pytest.fixture
def far(harness):
    """A store whose shared tier holds a context of eight blocks that only another store knows."""
    records = {}
    writer = harness(4 * MIB, SharedMemoryTier(records))
    writer.save(writer.chain(1, 8))
    writer.flush()
    return harness(4 * MIB, SharedMemoryTier(records))


def test_a_prestage_brings_up_a_context_that_only_a_shared_tier_holds(far) -> None:
    chain = far.chain(1, 8)
    assert far.store.prestage(far.namespace, chain.keys, 0.0) == 8
    until_up(far, chain)
    fetched = far.store.fetch(far.namespace, chain.keys, 60.0)
    assert fetched.sources == {"host": 8}
    assert far.store.release(fetched.lease)


def test_a_later_prestage_from_a_shared_tier_is_read_before_its_time(far) -> None:
    chain = far.chain(1, 8)
    assert far.store.prestage(far.namespace, chain.keys, 60.0) == 8
    assert in_memory(far, chain) == 0, "it would occupy memory for a minute"
    far.clock.advance(59.6)
    hints.start_prestages(far.store)
    until_up(far, chain)


def test_a_pin_holds_a_context_that_only_a_shared_tier_held(far) -> None:
    chain = far.chain(1, 8)
    assert far.store.pin(far.namespace, chain.keys, 100.0) == 8
    for seed in range(100, 150):
        far.save(far.chain(seed, 8))
        far.flush_writes()
    assert in_memory(far, chain) == 8


def prestaged(one, chain):
    """Prestage a chain, and wait until it is kept in memory."""
    before = one.store.status().hints.staged_bytes
    one.store.prestage(one.namespace, chain.keys, 0.0)
    one.view.wait_until(
        lambda: one.store.status().hints.staged_bytes > before, "the context is kept in memory"
    )


def test_a_prestaged_context_stays_in_memory_until_it_is_used(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    below_only(one, chain)
    prestaged(one, chain)
    for seed in range(100, 150):
        one.save(one.chain(seed, 8))
        one.flush_writes()
    assert in_memory(one, chain) == 8
    assert one.read(chain) == 8
    assert one.store.status().hints.staged_bytes == 0
    assert one.nothing_is_left_over()


def test_a_prestaged_context_that_is_not_used_leaves_after_a_while(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    below_only(one, chain)
    prestaged(one, chain)
    one.clock.advance(hints.STAGED_S + 0.1)
    one.store.housekeep()
    assert one.store.status().hints.staged_bytes == 0
    assert one.nothing_is_left_over()


def test_a_prestage_for_more_than_fits_brings_up_the_leading_blocks_that_fit(laddered) -> None:
    one = laddered
    most = one.store.host_bytes // 2 // one.namespace.slot_bytes
    chain = one.chain(1, most + 40)
    for start in range(0, most + 40, 20):
        one.save(chain, start, min(start + 20, most + 40))
        one.flush_writes()
    leave_all(one.store)
    assert one.store.prestage(one.namespace, chain.keys, 0.0) == most
    one.view.wait_until(lambda: one.store.status().hints.staged_bytes, "the leading blocks are up")
    assert in_memory(one, chain) == most
    assert one.save(one.chain(2, 8)) == 8, "memory is not held for the rest"


def test_prestages_and_pins_together_hold_at_most_half_of_host_memory(laddered) -> None:
    one = laddered
    blocks = one.store.host_bytes // 4 // one.namespace.slot_bytes
    chains = [one.chain(seed, blocks) for seed in range(3)]
    for chain in chains:
        one.save(chain)
        below_only(one, chain)
    prestaged(one, chains[0])
    prestaged(one, chains[1])
    assert one.store.pin(one.namespace, chains[2].keys, 60.0) < 8
    one.store.prestage(one.namespace, chains[2].keys, 0.0)
    assert one.store.status().hints.prestaging == 1, "it waits for room"
    assert one.read(chains[0]) == blocks
    hints.start_prestages(one.store)
    until_up(one, chains[2])


def test_dropped_contexts_are_not_kept_for_their_prestages(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    prestaged(one, chain)
    one.store.drop("*")
    assert one.store.status().hints.staged_bytes == 0
    assert (one.nothing_is_left_over(), one.view.used_slots(one.namespace)) == (True, 0)


class StuckTier(SharedMemoryTier):
    """Reads nothing before it is told to."""

    def __init__(self, records):
        super().__init__(records, "stuck")
        self.asked, self.go_on = threading.Event(), threading.Event()

    def read(self, batch):
        self.asked.set()
        assert self.go_on.wait(60)
        return super().read(batch)


def test_a_prestage_from_a_tier_that_hangs_does_not_delay_one_from_another_tier(harness) -> None:
    one = harness(4 * MIB, MemoryTier(64 * MIB), stuck := StuckTier({}))
    slow, fast = one.chain(1, 4), one.chain(2, 4)
    for chain in (slow, fast):
        one.save(chain)
    one.flush()
    leave(one.store, one.namespace, slow.keys, 0, 1)
    leave(one.store, one.namespace, fast.keys)
    one.store.prestage(one.namespace, slow.keys, 0.0)
    assert stuck.asked.wait(60)
    one.store.prestage(one.namespace, fast.keys, 0.0)
    until_up(one, fast)
    stuck.go_on.set()
    until_up(one, slow)


def test_many_prestages_of_one_domain_do_not_delay_another_domains(harness, monkeypatch) -> None:
    monkeypatch.setattr(core, "PRESTAGES_AT_ONCE", 1)
    one, begun, go_on = harness(4 * MIB, MemoryTier(MIB)), SimpleQueue(), threading.Event()
    monkeypatch.setattr(hints, "_promote", lambda _, staging: begun.put(staging.chain.namespace))
    one.store.background.submit(WorkItem(b""), go_on.wait)
    other = one.namespace._replace(domain=b"o" * 16)
    for seed, namespace in enumerate((*[one.namespace] * 3, other)):
        chain = NamedChain(namespace, b"".join(one.chain(seed, 8).keys))
        one.store.pending_hints.wait(0.0, PendingPrestage(chain, PrestageTimes(0.0)))
    hints.start_prestages(one.store)
    go_on.set()
    order = [begun.get(timeout=60) for _ in range(4)]
    assert order == [one.namespace, other, one.namespace, one.namespace]


def test_a_prestage_in_progress_does_not_delay_the_exit_of_the_program(
    laddered, monkeypatch
) -> None:
    one, begun = laddered, SimpleQueue()
    monkeypatch.setattr(hints, "_promote", lambda *_: begun.put(threading.current_thread()))
    chain = NamedChain(one.namespace, b"")
    one.store.pending_hints.wait(0.0, PendingPrestage(chain, PrestageTimes(0.0)))
    hints.start_prestages(one.store)
    assert begun.get(timeout=60).daemon


def test_a_prestage_whose_thread_cannot_start_is_not_counted_as_running(
    laddered, monkeypatch
) -> None:
    one, begun = laddered, threading.Event()
    monkeypatch.setattr(hints, "_promote", lambda *_: begun.set())
    monkeypatch.setattr("holdfast.store.pending_hints.BEGUN_MAX", 1)
    start = threading.Thread.start

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    for started in (refuse, start):
        monkeypatch.setattr(threading.Thread, "start", started)
        chain = NamedChain(one.namespace, b"")
        one.store.pending_hints.wait(0.0, PendingPrestage(chain, PrestageTimes(0.0)))
        hints.start_prestages(one.store)
    assert begun.wait(60)


@pytest.mark.parametrize("in_memory_blocks", [0, 3, 8])
def test_a_pin_counts_as_a_use_of_its_blocks_and_a_prestage_does_not(
    laddered, in_memory_blocks
) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    below_only(one, chain)
    assert one.read(one.chain(1, in_memory_blocks)) == in_memory_blocks
    one.touched.clear()
    one.store.prestage(one.namespace, chain.keys, 0.0)
    until_up(one, chain)
    one.view.wait_until(lambda: one.store.status().hints.staged_bytes, "the context is kept")
    assert (in_memory(one, chain), one.touched) == (8, [])
    assert one.expected[-1] == (8, one.clock.now()), "it is needed now, if it was in memory or not"
    one.clock.advance(hints.STAGED_S + 0.1)
    one.store.housekeep()
    below_only(one, chain)
    assert one.store.pin(one.namespace, chain.keys, 100.0) == 8
    assert one.touched == [8]


def test_pinned_blocks_are_not_evicted_until_the_pin_ends(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain)
    below_only(one, chain)
    assert one.store.pin(one.namespace, chain.keys, 100.0) == 8
    for seed in range(2, 60):
        one.save(one.chain(seed, 8))
        one.flush_writes()
    assert in_memory(one, chain) == 8
    one.clock.advance(101.0)
    one.store.housekeep()
    assert one.store.status().hints.pinned_bytes == 0
    for seed in range(60, 120):
        one.save(one.chain(seed, 8))
        one.flush_writes()
    assert in_memory(one, chain) == 0


def test_pins_hold_at_most_half_of_host_memory(laddered) -> None:
    one = laddered
    pinned = 0
    for seed in range(40):
        chain = one.chain(seed, 8)
        one.save(chain)
        one.flush_writes()
        pinned += one.store.pin(one.namespace, chain.keys, 100.0)
    assert 0 < pinned * one.namespace.slot_bytes <= one.store.host_bytes // 2
    assert one.save(one.chain(99, 8)) == 8, "there is room for others"


def test_concurrent_pins_together_hold_at_most_half_of_host_memory(laddered, monkeypatch) -> None:
    one, fetch_unverified, pinned = laddered, hints.fetch_unverified, []
    half = one.store.host_bytes // 2 // one.namespace.slot_bytes
    chains = [one.chain(seed, half) for seed in (1, 2)]
    for chain in chains:
        one.save(chain)
        one.flush_writes()

    def meanwhile(*asked):
        if not pinned:
            pinned.append(0)
            pinned.append(one.store.pin(one.namespace, chains[1].keys, 100.0))
        return fetch_unverified(*asked)

    monkeypatch.setattr(hints, "fetch_unverified", meanwhile)
    pinned.append(one.store.pin(one.namespace, chains[0].keys, 100.0))
    assert sum(pinned) == half
    assert one.store.status().hints.pinned_bytes == half * one.namespace.slot_bytes


def test_ephemeral_contexts_are_not_written_below_and_are_evicted_first(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 8)
    one.save(chain, retention=Retention.EPHEMERAL)
    assert one.expected == [(8, NEVER)]
    one.flush()
    assert one.tier.usage().records == 0
    one.save(one.chain(2, 8))
    one.flush()
    assert one.tier.usage().records == 8


def test_durable_contexts_are_written_at_once_without_write_behind(harness) -> None:
    one = expecting(harness, MemoryTier(64 * MIB), writes_behind=False)
    one.save(one.chain(1, 4))
    one.save(one.chain(2, 4), retention=Retention.DURABLE)
    one.flush()
    assert one.tier.usage().records == 4
    one.save(one.chain(1, 4), retention=Retention.DURABLE)
    one.flush()
    assert one.tier.usage().records == 8, "what was held already is kept for longer"


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (
            lambda store, namespace: store.closed(namespace.domain, ""),
            "0 characters is not from 1 to 256",
        ),
        (lambda store, namespace: store.follow(namespace, "", []), "0 characters"),
        (lambda store, namespace: store.follow(namespace, "x" * 257, []), "257 characters"),
        (
            lambda store, namespace: store.returns(namespace.domain, "a", -1.0),
            "returns.in_s: -1 is not",
        ),
        (
            lambda store, namespace: store.prestage(namespace, [], 1e6),
            r"prestage.in_s: 1e\+06 is not from",
        ),
        (
            lambda store, namespace: store.pin(namespace, [], float("nan")),
            "pin.ttl_s: nan is not from 0",
        ),
    ],
)
def test_hints_out_of_bounds_are_refused_by_name(laddered, say, words) -> None:
    with pytest.raises(BlockError, match=words):
        say(laddered.store, laddered.namespace)


def test_the_number_of_pending_prestages_is_bounded(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 1)
    one.save(chain)
    below_only(one, chain)
    for _ in range(WAITING_MAX + 5):
        one.store.prestage(one.namespace, chain.keys, 80_000.0)
    assert one.store.status().hints.prestaging == WAITING_MAX // 2


def test_a_context_pinned_again_at_every_turn_is_counted_once(laddered) -> None:
    one, chain = laddered, laddered.chain(1, 24)
    one.save(chain)
    one.flush_writes()
    for work_item in range(1, 25):
        assert one.store.pin(one.namespace, chain.keys[:work_item], 100.0 - work_item) == work_item
    pinned = one.store.status().hints.pinned_bytes
    assert pinned == 24 * one.namespace.slot_bytes
    assert one.view.leases == 1
    one.clock.advance(98.0)  # what was promised first holds
    one.store.housekeep()
    assert one.store.status().hints.pinned_bytes == pinned
    one.clock.advance(2.0)
    one.store.housekeep()
    assert one.store.status().hints.pinned_bytes == 0
    assert one.nothing_is_left_over()


class AnnouncedPool(SharedMemoryTier):
    """A shared tier that is told what will be read, and when."""

    def __init__(self, records):
        super().__init__(records)
        self.announced = SimpleQueue()

    def announce(self, namespace, keys, start, in_s):
        self.announced.put((list(keys), start, in_s))


def test_a_prestage_ahead_of_time_is_announced_to_the_shared_tier_that_holds_it(harness) -> None:
    records = {}
    writer = harness(4 * MIB, SharedMemoryTier(records))
    chain = writer.chain(1, 8)
    writer.save(chain)
    writer.flush()
    pool = AnnouncedPool(records)
    one = harness(4 * MIB, pool)
    assert one.store.prestage(one.namespace, chain.keys, 60.0) == 8
    keys, start, in_s = pool.announced.get(timeout=60)
    assert (keys, start) == (chain.keys, 0)
    assert 0.0 < in_s <= 60.0, "the store reads a little before the context is needed"


def test_a_prestage_that_is_due_at_once_is_read_and_not_announced(harness) -> None:
    records = {}
    writer = harness(4 * MIB, SharedMemoryTier(records))
    chain = writer.chain(1, 8)
    writer.save(chain)
    writer.flush()
    pool = AnnouncedPool(records)
    one = harness(4 * MIB, pool)
    one.store.prestage(one.namespace, chain.keys, 0.0)
    until_up(one, chain)
    assert pool.announced.empty()
