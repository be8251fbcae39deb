"""What a store learns of tiers and engines decides what is worth fetching, and outlives it."""

import threading

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.fairness.fair_queue import MIN_SHARE
from holdfast.plan.cost import PrefillCost
from holdfast.plan.fit import OnlineFit
from holdfast.store import core, promote
from holdfast.store import fetch as fetch_path
from holdfast.store.estimates import (
    ENGINES_MAX,
    PROBE_S,
    USUAL_BYTES,
    EngineId,
    EngineStep,
    Estimates,
)
from holdfast.store.estimates_file import EstimatesFile
from holdfast.store.lookup import PromptTokens
from holdfast.store.options import StoreOptions
from holdfast.store.plan_log import PlanEnding
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import leave

MIB = 1 << 20
ENGINE = EngineId("vllm", "f" * 32)
COST = PrefillCost(1e-3, 1e-4, 0.0)
SLOW_READ_S = 0.3


@pytest.fixture
def small_waves(monkeypatch):
    """Eight of the harness's blocks are read together, one such batch after the other.

    Two at once would move the clock for each other: a store might see one batch of both as read in
    no time, and learn nothing from it.
    """
    monkeypatch.setattr(promote, "BATCH_BYTES", 8 * 20_480)
    monkeypatch.setattr(core, "BATCHES_AT_ONCE", 1)


class SlowTier(MemoryTier):
    """Reads that move the clock, and that wait for `gate` where it is shut."""

    def __init__(self, clock, seconds_a_block):
        super().__init__(64 * MIB)
        self.clock, self.seconds_a_block = clock, seconds_a_block
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.reads = 0

    def read(self, batch):
        self.begun.release()
        assert self.gate.wait(60)
        self.reads += len(batch)
        self.clock.advance(self.seconds_a_block * len(batch))
        return super().read(batch)


def teach(estimates, cost=COST, engine=ENGINE):
    estimates.computed(
        engine,
        [EngineStep(new, 0, cost.seconds(new)) for new in (64, 128, 512, 2048) for _ in range(3)],
    )


def demoted(harness, seconds_a_block, **options):
    """Return a store with a 20-block chain on its lower tier only, and the chain."""
    one = harness(2 * MIB, SlowTier(ManualClock(), seconds_a_block), **options)
    one.tier.clock = one.clock
    one.store.estimates.asked(1, MIB, one.namespace.domain)  # it was fast once, or so it seemed
    one.clock.advance(1e-3)
    one.store.estimates.arrived(1, MIB, one.namespace.domain, of=MIB)
    chain = one.chain(1, 20)
    one.save(chain)
    one.flush()
    leave(one.store, one.namespace, chain.keys)
    return one, chain


def judged(one, chain, tokens, have=0):
    return one.store.plan_fetch(one.namespace, chain.keys, PromptTokens(ENGINE, tokens, have, 5.0))


def test_an_engine_that_reported_no_timings_is_given_all_held_blocks(harness):
    one, chain = demoted(harness, 0.0)
    found = judged(one, chain, 330)
    assert (found.held, found.plan.blocks) == (20, 20)
    assert found.sources == {"memory": 20}
    assert found.plan.recompute_s == 0


def test_a_slow_tier_is_avoided_and_probed_until_it_is_fast_again(harness, small_waves):
    one, chain = demoted(harness, SLOW_READ_S)
    teach(one.store.estimates)
    assert judged(one, chain, 330).plan.blocks == 20  # nobody knows better yet
    fetched = one.store.fetch(one.namespace, chain.keys, 60.0)
    assert one.store.release(fetched.lease)
    leave(one.store, one.namespace, chain.keys)
    found = judged(one, chain, 330)
    assert found.plan.blocks == 0
    assert found.held == 20
    assert "memory too slow" in found.plan.reason
    one.tier.seconds_a_block, before = 1e-5, one.tier.reads
    for probes in range(30):
        one.clock.advance(PROBE_S + 1)
        found = judged(one, chain, 330)
        if found.plan.blocks == 20:
            break
        assert one.tier.reads == before + probes, "the engine computes now"
        one.store.learn(ENGINE, [], [])
        one.view.wait_until_read()
        leave(one.store, one.namespace, chain.keys[:1])
    assert found.plan.blocks == 20


def turned_out_slow(harness):
    """Return a store that has read a chain of 20 blocks, and how slowly; all are below again."""
    one, chain = demoted(harness, SLOW_READ_S)
    assert one.store.release(one.store.fetch(one.namespace, chain.keys, 60.0).lease)
    leave(one.store, one.namespace, chain.keys)
    one.clock.advance(PROBE_S + 1)
    return one, chain


def test_a_slow_tier_is_probed_at_once_for_an_engine_without_timings(harness, small_waves):
    one, chain = turned_out_slow(harness)
    prompt = PromptTokens(EngineId("silent", "f" * 32), 330, 0, limit_s=0.01)
    assert one.store.plan_fetch(one.namespace, chain.keys, prompt).plan.blocks == 0
    one.view.wait_until_read()
    assert one.tier.reads == 21


def test_a_plan_request_waits_for_no_fit_of_fetch_or_probe_timings(
    harness, small_waves, monkeypatch
):
    one, chain = turned_out_slow(harness)
    teach(one.store.estimates)
    one.store.learn(ENGINE, [], [])
    fits, fitted, fit = [], threading.Event(), OnlineFit._fit

    def noted(self):
        fits.append(self)
        found = fit(self)
        fitted.set()
        return found

    monkeypatch.setattr(OnlineFit, "_fit", noted)
    assert judged(one, chain, 330).plan.blocks == 0
    assert fits == []
    one.store.learn(ENGINE, [], [])
    assert fitted.wait(60), "the probe's own thread fits what it has shown"
    judged(one, chain, 330)
    assert len(fits) == 1


def test_blocks_that_the_engine_already_has_are_not_planned_for_fetch(harness):
    one, chain = demoted(harness, 0.0)
    teach(one.store.estimates)
    found = judged(one, chain, 330, have=250)
    assert found.sources == {"memory": 5}
    assert judged(one, chain, 330, have=320).number == 0


def test_a_late_fetch_cancels_its_reads_that_have_not_started(harness, small_waves, monkeypatch):
    monkeypatch.setattr(core, "BATCHES_AT_ONCE", 2)
    one, chain = demoted(harness, 0.0)
    one.tier.gate.clear()
    wait = fetch_path.wait

    def once_two_are_read(readings, timeout):
        assert all(one.tier.begun.acquire(timeout=60) for _ in range(2))
        return wait(readings, timeout=0.0)

    with monkeypatch.context() as patch:
        patch.setattr(fetch_path, "wait", once_two_are_read)
        fetched = one.store.fetch(one.namespace, chain.keys, 1.0)
    assert fetched.outcome is Outcome.LATE
    queued = one.store.estimates.estimates(one.namespace.domain)[1].queued_bytes
    assert queued == 16 * one.namespace.slot_bytes  # two waves are being read, the third is not
    one.tier.gate.set()
    one.view.wait_until_read()
    assert one.tier.reads == 16
    assert one.store.estimates.estimates(one.namespace.domain)[1].queued_bytes == 0
    assert one.store.release(fetched.lease)
    assert one.read(chain) == 20


def test_a_domain_with_credit_is_estimated_nearly_all_of_a_flooded_tiers_bandwidth():
    credit = {}
    estimates = Estimates(
        ["host", "disk"],
        ManualClock(),
        credit=lambda tier, domain: credit.get(domain, 0) * (tier == 1),
    )
    estimates.asked(1, 1 << 33, b"flood")
    whole = estimates.estimates(b"flood")[1].bytes_per_s
    half = estimates.estimates(b"light")[1]
    assert half.bytes_per_s == pytest.approx(whole / 2)
    credit[b"light"] = USUAL_BYTES
    most = estimates.estimates(b"light")[1]
    assert most.bytes_per_s == pytest.approx((1 - MIN_SHARE) * whole)
    assert most.queued_bytes == 0
    estimates.asked(1, MIB, b"light")  # that much of the credit is as good as spent
    assert estimates.estimates(b"light")[1].bytes_per_s == pytest.approx(whole / 2)


RIVAL = ENGINE._replace(domain="aa" * 16)
OWN = ENGINE._replace(domain="bb" * 16)
DEARER = PrefillCost(1.0, 1.0, 0.0)


def test_timings_of_one_domain_do_not_change_another_domains_estimates():
    estimates = Estimates(["host"], ManualClock())
    teach(estimates, engine=OWN)
    known = estimates.cost(OWN), estimates.token_s(OWN.fingerprint, OWN.domain)
    assert known[1] == pytest.approx(COST.b, rel=0.01)
    teach(estimates, DEARER, RIVAL)
    for number in range(ENGINES_MAX):  # one that calls itself ever something else
        teach(estimates, DEARER, RIVAL._replace(name=str(number)))
    assert (estimates.cost(OWN), estimates.token_s(OWN.fingerprint, OWN.domain)) == known


def test_estimates_saved_without_domains_are_used_until_a_domain_reports_its_own():
    estimates = Estimates(["host"], ManualClock())
    teach(estimates)
    old = estimates.as_data()
    for engine in old["engines"]:
        del engine["domain"]
    teach(estimates, DEARER, OWN)
    for data, cost in ((old, COST), (estimates.as_data(), DEARER)):
        again = Estimates(["host"], ManualClock())
        again.restore(data)
        assert again.cost(OWN)[0].b == pytest.approx(cost.b, rel=0.01)
        assert again.cost(RIVAL)[0].b == pytest.approx(COST.b, rel=0.01)


def test_a_cost_request_does_not_wait_for_the_fit(monkeypatch):
    estimates = Estimates(["host", "disk"], ManualClock())
    estimates.computed(ENGINE, [EngineStep(n, 0, COST.seconds(n)) for n in (256, 512, 1024)])
    monkeypatch.setattr("holdfast.plan.fit._least_squares", lambda *_: pytest.fail("fitted late"))
    cost, _ = estimates.cost(ENGINE)
    assert cost is not None
    assert cost.b == pytest.approx(COST.b, rel=0.05)


def test_an_engines_load_time_is_learnt_from_the_plans_it_followed(harness):
    one, chain = demoted(harness, 0.0)
    size = one.namespace.slot_bytes
    for _ in range(6):
        plan = judged(one, chain, 330)
        one.store.plan_log.fetched(ENGINE, plan.number, 3, 0.02, "ok")
        one.store.learn(ENGINE, [], [PlanEnding(plan.number, 0.05, 0.2)])
    before = one.store.estimates.changes
    one.store.estimates.delivered(ENGINE, 3 * size, 0.03)
    assert one.store.estimates.changes == before + 1, "so that it is saved"
    _, delivery = one.store.estimates.cost(ENGINE)
    assert delivery.seconds(3 * size) == pytest.approx(0.03, rel=0.1)


def test_a_plan_is_not_followed_if_the_engine_already_has_all_held_blocks(harness):
    one, chain = demoted(harness, 0.0)
    first = judged(one, chain, 330)
    again = PromptTokens(ENGINE, 330, 20 * 16, 5.0, instead_of=first.number)
    assert one.store.plan_fetch(one.namespace, chain.keys, again).number == 0
    (plan,) = one.store.plans().plans
    assert (plan.plan, plan.not_followed) == (first.number, "engine_had_it")


def test_estimates_outlive_the_store(tmp_path, harness, small_waves):
    file = tmp_path / "learnt.json"
    one, chain = demoted(harness, SLOW_READ_S, estimates_file=file)
    teach(one.store.estimates)
    one.read(chain, 60.0)
    one.store.close()
    again = Estimates(["host", "memory"], ManualClock())
    EstimatesFile(again, file).load()
    assert again.cost(ENGINE)[0] == pytest.approx(one.store.estimates.cost(ENGINE)[0])
    assert (
        again.estimates(one.namespace.domain)[1].bytes_per_s
        < one.namespace.slot_bytes / SLOW_READ_S * 1.5
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 1}',
        '{"version": 1, "tiers": {"host": 3}, "engines": []}',
        '{"version": 1, "tiers": {}, "engines": [{}]}',
        '{"version": 1, "tiers": [], "engines": 5}',
    ],
)
def test_a_file_without_valid_estimates_is_a_cold_start(tmp_path, text, caplog):
    file = tmp_path / "learnt.json"
    file.write_text(text)
    estimates = Estimates(["host"], ManualClock())
    learnt = EstimatesFile(estimates, file)
    learnt.load()
    assert "will be measured again" in caplog.text
    assert estimates.engine_speeds() == []
    teach(estimates)
    learnt.save()
    EstimatesFile(Estimates(["host"], ManualClock()), file).load()
    assert caplog.text.count("measured again") == 1


def test_a_store_without_an_estimates_file_creates_one(tmp_path):
    file = tmp_path / "learnt.json"
    with Store(MIB, [], {"default": b"s" * 32}, StoreOptions(estimates_file=file)) as store:
        store.start()
        teach(store.estimates)
    assert file.exists()
    assert file.stat().st_mode & 0o077 == 0


def test_the_time_saved_by_reading_from_a_tier_matches_the_measurements():
    clock = ManualClock()
    estimates = Estimates(["host", "cxl", "disk"], clock)
    assert estimates.saved_s(1, 2 * MIB) == 2 * estimates.saved_s(1, MIB) > 0, "nothing is known"
    for tier, bytes_per_s in ((1, 8e9), (2, 2e9)):
        for nbytes in (MIB, 4 * MIB, 16 * MIB) * 8:
            estimates.asked(tier, nbytes, b"d")
            clock.advance(1e-3 * tier + nbytes / bytes_per_s)
            estimates.arrived(tier, nbytes, b"d", of=nbytes)
    saved = 1e-3 + MIB / 2e9 - MIB / 8e9
    assert estimates.saved_s(1, MIB) == pytest.approx(saved, rel=0.1)
    assert estimates.saved_s(2, MIB) > 0, "the last has none to be compared with"
