"""Page locks of two domains that share memory, against a model of what each engine has pinned.

The model notes which chunks an engine has locked, from the grant to its unlock, or to the end of
its session. The arenas are watched: memory that the model calls locked must never be returned.
"""

import contextlib
import itertools
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace
from holdfast.codec.pack import payload
from holdfast.fairness.shares import Quota
from holdfast.store import domains, evict, page_locks
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.payloads import payload_of
from holdfast.testing.store_view import StoreView
from holdfast.tiers.base import NOWHERE
from holdfast.tiers.chunks import FREE, PREFAULTED

KIB = 1 << 10
CHUNKS = 16
CHUNK = 64 * KIB
RESERVED = 3 * CHUNK
NAMES = ("default", "other")
SIZES = 3_000, 30_000
BLOCK_TOKENS = 4
FINGERPRINT = b"lock-machine-16b"
CHAINS, CHAIN_BLOCKS = 6, 40

_domains = st.integers(0, 1)
_chains = st.integers(0, CHAINS - 1)
_engines = st.integers(0, 2)


class Engine:
    """A session that locks memory: what the node granted it, and what it is asked for."""

    def __init__(self, domain):
        self.engine, self.failure = f"engine of {domain}", ""
        self.domain = domain
        self.locked, self.asked = set(), set()

    def recall(self, chunks):
        self.asked.update(chunks)


class LockMachine(RuleBasedStateMachine):
    """Random saves, loads, locks, recalls and ends of sessions."""

    def __init__(self):
        super().__init__()
        quotas = {"default": {}, "other": {0: Quota(reserved_bytes=RESERVED)}}
        keys = {name: name.encode().ljust(32, b"k") for name in NAMES}
        self.store = Store(CHUNKS * CHUNK, [], keys, StoreOptions(quotas=quotas))
        self.table = self.store.table
        self.hosts = [self.table.hosts[self.store.domain_ids[name]] for name in NAMES]
        self.engines = [Engine(0), Engine(0), Engine(1)]
        self.leases = []
        for number, host in enumerate(self.hosts):
            self._watch(number, host)
        self.chains = []
        for seed in range(CHAINS):
            chain = Chain(b"k" * 32, FINGERPRINT, BLOCK_TOKENS)
            chain.extend(random.Random(seed).choices(range(1000), k=BLOCK_TOKENS * CHAIN_BLOCKS))
            self.chains.append(chain.keys)

    def _watch(self, number, host):
        give_back = host.arena.give_back

        def watched(offset, nbytes):
            given = set(range(offset // CHUNK, (offset + nbytes) // CHUNK))
            assert not given & self._locked(number), "locked memory is returned to the kernel"
            give_back(offset, nbytes)

        host.arena.give_back = watched

    def _locked(self, domain):
        return set().union(*(each.locked for each in self.engines if each.domain == domain))

    def _namespace(self, domain, size=0):
        digest = self.store.domain_ids[NAMES[domain]]
        return Namespace(FINGERPRINT[:15] + bytes([size]), digest, SIZES[size], BLOCK_TOKENS)

    @initialize(full=st.booleans(), size=st.integers(0, 1))
    def begin(self, full, size):
        """Begin empty, or with memory full of the first domain's blocks, and locked."""
        for number in range(CHAINS if full else 0):
            self.save(0, number, size, CHAIN_BLOCKS)
        if full:
            self.lock(0, 0, CHUNKS)

    @rule(
        domain=_domains, number=_chains, size=st.integers(0, 1), count=st.integers(1, CHAIN_BLOCKS)
    )
    def save(self, domain, number, size, count):
        namespace, keys = self._namespace(domain, size), self.chains[number][:count]
        reserved = self.store.reserve(namespace, keys, namespace.fingerprint, 0)
        host = self.hosts[domain]
        for key, place in zip(keys, reserved.places, strict=True):
            if place != NOWHERE:
                assert not host.is_recalled(place), "a recalled run got a new block"
                payload(host.arena.view[place:], namespace.raw_bytes)[:] = payload_of(
                    key + namespace.domain, namespace.raw_bytes
                )
        self.store.commit(reserved.ticket)

    @rule(domain=_domains, number=_chains, size=st.integers(0, 1), keep=st.booleans())
    def fetch(self, domain, number, size, keep):
        namespace, keys = self._namespace(domain, size), self.chains[number]
        fetched = self.store.fetch(namespace, keys, 60.0)
        view = self.hosts[domain].arena.view
        for key, place in zip(keys, fetched.places, strict=False):
            right = payload_of(key + namespace.domain, namespace.raw_bytes)
            assert bytes(payload(view[place:], namespace.raw_bytes)) == bytes(right)
        if keep:
            self.leases.append((domain, fetched.lease))
        else:
            self.store.release(fetched.lease)

    @precondition(lambda self: self.leases)
    @rule()
    def release(self):
        self.store.release(self.leases.pop(0)[1])

    @rule(number=_engines, first=st.integers(-1, CHUNKS), count=st.integers(0, CHUNKS))
    def lock(self, number, first, count):
        """Ask for chunks; without any, the node chooses."""
        engine, chunks = self.engines[number], list(range(first, first + count))
        namespace = self._namespace(engine.domain)
        before = self._locked(engine.domain)
        limit = page_locks.lockable_bytes(self.store, namespace) // CHUNK
        granted = page_locks.lock(self.store, namespace, chunks, engine, count)
        used = {each for each in granted if self.hosts[engine.domain]._chunks.is_in_use(each)}
        assert used == set(granted), "only chunks in use"
        assert len(before | set(granted)) <= max(limit, len(before))
        assert not set(granted) - before & self.hosts[engine.domain]._locks.recalled
        engine.locked.update(granted)
        page_locks.populate(self.store, namespace, granted)

    @rule(number=_engines, share=st.floats(0, 1))
    def unlock(self, number, share):
        """Unlock some chunks, those that are asked for first."""
        engine = self.engines[number]
        order = sorted(engine.locked, key=lambda chunk: (chunk not in engine.asked, chunk))
        self._unlock(engine, order[: math.ceil(share * len(order))])

    @rule(number=_engines)
    def answer_recall(self, number):
        engine = self.engines[number]
        self._unlock(engine, sorted(engine.asked & engine.locked))

    @rule(number=_engines)
    def end_session(self, number):
        """The engine's process is gone, or missed a recall: its locks are dropped."""
        engine = self.engines[number]
        self._unlock(engine, sorted(engine.locked))
        self.engines[number] = Engine(engine.domain)

    def _unlock(self, engine, chunks):
        engine.locked.difference_update(chunks)
        engine.asked.difference_update(chunks)
        page_locks.unlock(self.store, self._namespace(engine.domain), chunks, engine)

    @rule()
    def look_ahead(self):
        """One look of the thread that faults memory in."""
        for host in self.hosts:
            host.reclaim()
            host.clear_erased()
            host.prefault()
        evict.recall_ahead(self.table)

    @rule(domain=_domains)
    def erase(self, domain):
        digest = self.store.domain_ids[NAMES[domain]]
        with self.table.lock:
            self.table.erasures[digest] += 1
        self.leases = [each for each in self.leases if each[0] != domain]
        domains.forget_domain(self.store, digest)

    @rule(seconds=st.sampled_from([0.1, 10.0]))
    def wait(self, seconds):
        """Let the rest of recalled chunks pass."""
        for host in self.hosts:
            resting = host._locks._resting
            for chunk in resting:
                resting[chunk] -= seconds

    @invariant()
    def the_node_knows_exactly_the_locks_that_engines_have(self):
        for engine in self.engines:
            assert self.hosts[engine.domain].locked_by(engine) == sorted(engine.locked)

    @invariant()
    def used_and_kept_chunks_never_exceed_the_budget(self):
        counted = 0
        for number, host in enumerate(self.hosts):
            states = host._chunks.states
            counted += sum(state not in (FREE, PREFAULTED) for state in states)
            for chunk in self._locked(number):
                assert states[chunk] not in (FREE, PREFAULTED), "a locked chunk left the budget"
        assert counted + self.store.budget.free_chunks == CHUNKS
        assert self.store.budget.free_chunks >= 0

    @invariant()
    def locks_leave_what_is_reserved_and_two_runs(self):
        """Memory beyond what a domain has reserved is locked only up to a common limit."""
        beyond = len(self._locked(0)) + max(0, len(self._locked(1)) - RESERVED // CHUNK)
        assert beyond <= CHUNKS - RESERVED // CHUNK - 2

    @invariant()
    def only_locked_chunks_are_kept(self):
        for number, host in enumerate(self.hosts):
            usage = host.lock_usage()
            assert usage.locked == len(self._locked(number))
            assert usage.kept <= usage.locked

    def teardown(self):
        for number in range(len(self.engines)):
            self.end_session(number)
        for _, lease in self.leases:
            self.store.release(lease)
        self.store.drop("*")
        assert self.store.budget.free_chunks == CHUNKS
        assert all(not host.has_locks for host in self.hosts)
        self.store.close()


LockMachine.TestCase.settings = settings(stateful_step_count=40)
TestLocks = LockMachine.TestCase


def test_a_reservation_is_filled_without_an_unlock_while_all_other_memory_is_locked():
    machine = LockMachine()
    for number in range(CHAINS):
        machine.save(0, number, 0, CHAIN_BLOCKS)
        machine.save(0, number, 1, CHAIN_BLOCKS)
    machine.lock(0, 0, CHUNKS)
    locked = len(machine._locked(0))
    assert locked == CHUNKS - RESERVED // CHUNK - 2
    namespace, keys = machine._namespace(1), machine.chains[0]
    blocks = RESERVED // namespace.slot_bytes
    assert blocks > len(keys)
    for number in range(blocks // CHAIN_BLOCKS):
        machine.save(1, number, 0, CHAIN_BLOCKS)
        assert machine.store.cover(namespace, machine.chains[number]).blocks == CHAIN_BLOCKS
    assert len(machine._locked(0)) == locked
    machine.teardown()


def test_memory_that_is_wanted_is_asked_for_ahead_of_its_use():
    machine = LockMachine()
    for number in range(CHAINS):
        machine.save(0, number, 1, CHAIN_BLOCKS)
    machine.lock(0, 0, CHUNKS)
    engine = machine.engines[0]
    machine.look_ahead()
    assert not engine.asked, "nobody wants memory"
    while not engine.asked:
        machine.save(1, len(engine.asked), 1, CHAIN_BLOCKS)
    first = set(engine.asked)
    machine.answer_recall(0)
    machine.save(1, 1, 1, CHAIN_BLOCKS)
    machine.look_ahead()
    assert engine.asked - first or machine.hosts[0].lock_usage().runs >= 2
    machine.teardown()


def test_a_domain_at_its_limit_asks_nobody_for_memory():
    machine = LockMachine()
    digest, size = machine.store.domain_ids["other"], machine._namespace(1).slot_bytes
    machine.table.usage._quotas[0][digest] = Quota(most_bytes=10 * size)
    machine.save(0, 0, 0, CHAIN_BLOCKS)
    machine.lock(0, 0, CHUNKS)
    machine.store.drop("*")
    assert machine.hosts[0].has_kept
    for number in range(3):
        machine.save(1, number, 0, 10)
    assert StoreView(machine.store).evictions[0] == 20
    assert not machine.engines[0].asked, "memory is free, and none of it would help"
    machine.teardown()


def ranks_of(machine, ranks):
    """Return namespaces of one domain and size, as the ranks of a model have them."""
    digest = machine.store.domain_ids["default"]
    return [
        Namespace(FINGERPRINT[:15] + bytes([9 + rank]), digest, SIZES[0], BLOCK_TOKENS)
        for rank in range(ranks)
    ]


def chunks_of(machine, namespace):
    return {copy.place // CHUNK for copy in StoreView(machine.store).copies(0, namespace)}


def test_ranks_that_lock_memory_have_runs_of_their_own_also_when_blocks_replace_others():
    machine = LockMachine()
    ranks = ranks_of(machine, 3)
    machine.save(0, 0, 0, CHAIN_BLOCKS)
    machine.lock(0, 0, 1)
    for turn in range(12):
        for namespace in ranks:
            keys = [bytes([turn, n]) * 8 for n in range(20)]
            reserved = machine.store.reserve(namespace, keys, namespace.fingerprint, 0)
            assert machine.store.commit(reserved.ticket) == 20, turn
    assert StoreView(machine.store).evictions[0] > 100
    used = [chunks_of(machine, namespace) for namespace in ranks]
    assert all(used)
    shared = sum(len(mine & other) for at, mine in enumerate(used) for other in used[:at])
    assert shared <= 2, used
    machine.teardown()


@pytest.mark.parametrize("quotas", [None, {"default": {}}], ids=["undivided", "divided"])
def test_a_namespace_without_blocks_evicts_the_least_valuable_one_of_another(monkeypatch, quotas):
    monkeypatch.setattr(evict, "_MAX_PASSED", 4)
    store = Store(CHUNKS * CHUNK, [], {"default": b"k" * 32}, StoreOptions(quotas=quotas))
    table, domain = store.table, store.domain_ids["default"]
    full, new = [Namespace(name * 16, domain, SIZES[0], BLOCK_TOKENS) for name in (b"f", b"n")]
    for n in range(table.host(full).slots(full.slot_bytes)):
        store.commit(store.reserve(full, [bytes([0, n]) * 8], full.fingerprint, 0).ticket)
    assert page_locks.lock(store, full, [0], Engine(0), 1) == [0]
    with table.lock, contextlib.closing(table.eviction.victims(store.clock.now())) as victims:
        least = list(itertools.islice(victims, 6))
    reserved = store.reserve(new, [b"n" * 16], new.fingerprint, 0)
    assert store.commit(reserved.ticket) == 1
    assert [table.is_on(row, 0) for row in least[1:]] == [True] * 5
    assert table.index.keys[least[0]] in {None, b"n" * 16}, "it left, and its row is free or reused"
    store.close()
