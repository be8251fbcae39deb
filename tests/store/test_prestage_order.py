"""Which of several prestages a store begins first, on a tier that cannot read all in time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from holdfast.errors import Outcome
from holdfast.plan.cost import PrefillCost, QueuedPrefill
from holdfast.store import core, promote
from holdfast.store.estimates import EngineId, EngineStep
from holdfast.store.hints import STAGED_S, TURN_S_MAX, EngineTurn
from holdfast.store.lookup import PromptTokens
from holdfast.testing.memory import MemoryTier

MIB = 1 << 20
ENGINE = EngineId("vllm", "f" * 32)
TOKEN_S = 0.01


class PacedTier(MemoryTier):
    """Reads take `block_s` of the store's clock each; notes the keys, and waits for a shut gate."""

    def __init__(self, block_s):
        super().__init__(64 * MIB)
        self.block_s, self.clock = block_s, None
        self.read_keys, self.gate = [], threading.Event()
        self.reading = SimpleQueue()
        self.gate.set()

    def read(self, batch):
        self.reading.put(batch)
        assert self.gate.wait(60)
        self.read_keys += [get.key for get in batch]
        self.clock.advance(self.block_s * len(batch))
        return super().read(batch)


@pytest.fixture
def paced(harness, monkeypatch):
    """A store that knows its engine's speed, over a tier that it knows reads a block in 0.25 s."""
    monkeypatch.setattr(core, "BATCHES_AT_ONCE", 1)
    one = harness(4 * MIB, PacedTier(0.25))
    one.tier.clock = one.clock
    cost = PrefillCost(0.0, TOKEN_S, 0.0)
    steps = [EngineStep(new, 0, cost.seconds(new)) for new in (64, 128, 512, 2048) * 3]
    one.store.learn(ENGINE, steps, [])
    for seed in range(100, 108):
        chain = one.chain(seed, 4)
        one.save(chain)
        one.leave_memory(chain)
        assert one.read(chain) == 4
    one.tier.read_keys.clear()
    while not one.tier.reading.empty():
        one.tier.reading.get()
    return one


def until_up(one, chain):
    """Wait until all blocks of a chain are in memory."""
    blocks = len(chain.keys)
    one.view.wait_until(
        lambda: one.view.held(one.namespace, chain.keys) == blocks, "the context is in memory"
    )


def waits(one, chain, tokens=0):
    """Announce the context of a request that waits behind so many tokens of prefill."""
    turn = EngineTurn(ENGINE, QueuedPrefill(tokens, 0.0))
    assert one.store.prestage(one.namespace, chain.keys, 0.0, turn=turn) == len(chain.keys)


def below(one, *seeds):
    chains = [one.chain(seed, 4) for seed in seeds]
    for chain in chains:
        one.save(chain)
        one.leave_memory(chain)
    return chains


def order_of(one, chains):
    """Return the numbers of chains in the order in which they were read."""
    firsts = [chain.keys[0] for chain in chains]
    return [firsts.index(key) for key in one.tier.read_keys if key in firsts]


def shut(one, chain):
    """Prestage a chain, and return when the tier is busy with it, until its gate is opened."""
    one.tier.gate.clear()
    waits(one, chain)
    one.tier.reading.get(timeout=60)


def test_a_slow_tier_reads_first_what_arrives_before_the_turn_of_its_request(paced) -> None:
    one, chains = paced, below(paced, *range(6))
    shut(one, chains[0])
    for number, tokens in ((1, 100), (2, 900), (3, 600), (4, 0), (5, 180)):
        waits(one, chains[number], tokens)  # 1.0, 9.0, 6.0, 0.0 and 1.8 s; a read takes 1 s
    one.tier.gate.set()
    for chain in chains:
        until_up(one, chain)
    assert order_of(one, chains) == [0, 3, 2, 5, 1, 4]


def test_a_request_whose_wait_is_not_known_is_prestaged_last_but_is_prestaged(paced) -> None:
    one, (busy, unknown, known) = paced, below(paced, 1, 2, 3)
    shut(one, busy)
    turn = EngineTurn(EngineId("silent", "f" * 32), QueuedPrefill(900, 0.0))
    assert one.store.prestage(one.namespace, unknown.keys, 0.0, turn=turn) == 4
    waits(one, known, 900)
    one.tier.gate.set()
    for chain in (unknown, known):
        until_up(one, chain)
    assert order_of(one, [busy, unknown, known]) == [0, 2, 1]


def test_a_request_that_waits_long_is_prestaged_at_once_if_the_tier_is_idle(paced) -> None:
    one, (chain,) = paced, below(paced, 1)
    waits(one, chain, 8_000_000)
    until_up(one, chain)


def test_nothing_is_read_for_a_request_whose_turn_has_come(paced) -> None:
    one, (busy, computed, waiting) = paced, below(paced, 1, 2, 3)
    shut(one, busy)
    waits(one, computed, 900)
    waits(one, waiting, 1_000)
    prompt = PromptTokens(ENGINE, 80, 0, limit_s=5.0)
    first = one.store.plan_fetch(one.namespace, computed.keys, prompt).number
    assert one.store.status().hints.prestaging == 2, "it was asked about when it arrived"
    one.store.plan_fetch(one.namespace, computed.keys, prompt._replace(instead_of=first))
    assert one.store.status().hints.prestaging == 1
    one.tier.gate.set()
    until_up(one, waiting)
    assert order_of(one, [busy, computed, waiting]) == [0, 2]


def test_reads_for_a_request_that_is_computed_instead_are_cancelled(paced, monkeypatch) -> None:
    monkeypatch.setattr(promote, "BATCH_BYTES", 4 * paced.namespace.slot_bytes)
    one, chain = paced, paced.chain(1, 12)
    one.save(chain)
    one.leave_memory(chain)
    prompt = PromptTokens(ENGINE, 208, 0, limit_s=5.0)
    first = one.store.plan_fetch(one.namespace, chain.keys, prompt)
    assert (first.held, first.plan.blocks) == (12, 0), "the tier is slower than the engine"
    shut(one, chain)
    one.view.wait_until(lambda: one.view.reading_ahead == 12, "all reads are queued")
    one.store.plan_fetch(one.namespace, chain.keys, prompt._replace(instead_of=first.number))
    one.tier.gate.set()
    one.view.wait_until(
        lambda: one.store.status().hints.staged_bytes == 4 * one.namespace.slot_bytes,
        "the blocks whose read had begun are kept",
    )
    assert one.tier.read_keys == chain.keys[:4]


def pinned(one, chain):
    threads = ThreadPoolExecutor(1)
    pinning = threads.submit(one.store.pin, one.namespace, chain.keys, 600.0, 600.0)
    threads.shutdown(wait=False)
    return chain.keys, pinning.result


def prestaged_for_a_longer_prompt(one, chain):
    waits(one, chain)
    return chain.keys, lambda: 12


def prestaged_for_another_engine(one, chain):
    other, cost = ENGINE._replace(name="sglang"), PrefillCost(0.0, TOKEN_S, 0.0)
    steps = [EngineStep(new, 0, cost.seconds(new)) for new in (64, 128, 512, 2048) * 3]
    one.store.learn(other, steps, [])
    turn = EngineTurn(other, QueuedPrefill(0, 0.0))
    assert one.store.prestage(one.namespace, chain.keys[:8], 0.0, turn=turn) == 8
    return chain.keys[:8], lambda: 8


def prestaged_for_another_process(one, chain):
    turn = EngineTurn(ENGINE, QueuedPrefill(0, 0.0), process=2)
    assert one.store.prestage(one.namespace, chain.keys[:8], 0.0, turn=turn) == 8
    return chain.keys[:8], lambda: 8


@pytest.mark.parametrize(
    "begin",
    [
        pinned,
        prestaged_for_a_longer_prompt,
        prestaged_for_another_engine,
        prestaged_for_another_process,
    ],
)
def test_reads_that_others_began_are_not_cancelled_with_those_of_a_request(
    paced, monkeypatch, begin
) -> None:
    monkeypatch.setattr(promote, "BATCH_BYTES", 4 * paced.namespace.slot_bytes)
    one, chain = paced, paced.chain(1, 12)
    one.save(chain)
    one.leave_memory(chain)
    prompt = PromptTokens(ENGINE, 144, 0, limit_s=5.0)
    first = one.store.plan_fetch(one.namespace, chain.keys[:8], prompt)
    assert (first.held, first.plan.blocks) == (8, 0), "the tier is slower than the engine"
    one.tier.gate.clear()
    keys, blocks = begin(one, chain)
    one.tier.reading.get(timeout=60)
    one.view.wait_until(lambda: one.view.reading_ahead == len(keys), "all reads are queued")
    again = prompt._replace(instead_of=first.number)
    assert one.store.plan_fetch(one.namespace, chain.keys[:8], again).plan.blocks == 0
    one.tier.gate.set()
    one.view.wait_until(lambda: one.view.reading_ahead == 0, "all reads have ended")
    assert one.tier.read_keys == keys
    assert blocks() == len(keys)


def test_a_plan_counts_once_what_a_prestage_of_the_same_context_is_reading(paced) -> None:
    one, chains = paced, below(paced, 1, 2)
    prompt = PromptTokens(EngineId("silent", "f" * 32), 80, 0, limit_s=60.0)
    idle_s = one.store.plan_fetch(one.namespace, chains[0].keys, prompt).plan.fetch_s
    shut(one, chains[0])
    on_its_way = one.store.plan_fetch(one.namespace, chains[0].keys, prompt).plan
    behind = one.store.plan_fetch(one.namespace, chains[1].keys, prompt).plan
    assert on_its_way.fetch_s == pytest.approx(idle_s)
    assert behind.fetch_s > 1.5 * idle_s
    one.tier.gate.set()


def test_a_fetch_of_a_context_that_is_on_its_way_ends_at_its_deadline(paced) -> None:
    one, (chain,) = paced, below(paced, 1)
    shut(one, chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 1.5)
    assert (fetched.places, fetched.outcome) == ([], Outcome.LATE)
    assert fetched.reason == "fetch all 4 blocks held; 0 arrived", "all were to arrive in 1 s"
    one.tier.gate.set()
    until_up(one, chain)


def test_a_store_that_closes_begins_no_further_prestage(paced) -> None:
    one, (busy, waiting) = paced, below(paced, 1, 2)
    shut(one, busy)
    waits(one, waiting)
    closing = threading.Thread(target=one.store.close)
    closing.start()
    one.view.wait_until(lambda: one.store.gone, "the store closes")
    one.tier.gate.set()
    closing.join()
    assert order_of(one, [busy, waiting]) == [0]


@pytest.mark.parametrize(("in_s", "tokens"), [(0.0, 1 << 40), (80_000.0, 0)])
def test_a_context_waits_in_memory_for_at_most_a_minute_for_its_turn(paced, in_s, tokens):
    [chain] = below(paced, 1)
    turn = EngineTurn(ENGINE, QueuedPrefill(tokens, 0.0))
    assert paced.store.prestage(paced.namespace, chain.keys, in_s, turn=turn) == 4
    paced.view.wait_until(lambda: paced.store.status().hints.staged_bytes, "it is prestaged")
    paced.clock.advance(TURN_S_MAX + STAGED_S)
    assert paced.store.status().hints.staged_bytes == 0
