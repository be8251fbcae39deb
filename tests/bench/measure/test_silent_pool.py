"""A silent pool is measured in pairs, on prompts nobody has seen, once it is known to be silent."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.harness.network import LoopbackNetwork
from holdfast_bench.harness.pool import SilentTargets
from holdfast_bench.measure import silent_pool
from holdfast_bench.measure.silent_pool import (
    FALLS,
    PROMPT_TOKENS,
    SilentPoolBench,
    SilentPoolEngines,
    SilentPoolSettings,
)

LEFT_OUT = 4
"""A member that is too slow to be asked, whose breaker may stay closed."""


class FakePool:
    """A pool that says when it is silent."""

    def __init__(self, *ways):
        self.ways, self.now, self.told, self.met = ways, None, [], 0

    def blocks(self):
        return {"t0": 3}

    def wait_holding(self, blocks):
        self.told.append(blocks)

    def silences(self):
        return list(self.ways)

    @contextmanager
    def silent(self, way):
        self.now, self.met = way, 0
        yield
        self.now = None


@pytest.fixture
def bench(monkeypatch):
    """Call with a pool and the seconds that each engine takes, by silence."""
    monkeypatch.setattr(silent_pool, "SPIN_S", 0.0)

    def make(pool, seconds, others=lambda: 0.0):
        asked = []
        monkeypatch.setattr(silent_pool, "OtherProcesses", lambda: SimpleNamespace(share=others))

        def complete(engine, prompt, _):
            asked.append((engine.name, pool.now, tuple(prompt)))
            pool.met += engine.name == "behind"
            taken = seconds(engine.name, pool.now, len(asked))
            return SimpleNamespace(ttft_s=taken)

        monkeypatch.setattr(silent_pool, "complete", complete)
        node = SimpleNamespace(
            members=lambda: [
                {
                    "phase": "closed" if pool.now is None or pool.met <= number else "open",
                    "ejected": pool.now is not None and number == LEFT_OUT,
                }
                for number in range(5)
            ],
            process=SimpleNamespace(check=lambda: None),
        )
        engines = SilentPoolEngines(SimpleNamespace(name="alone"), SimpleNamespace(name="behind"))
        return SilentPoolBench(
            engines, node, pool, SilentPoolSettings(None, 1000, 4, lambda _: None)
        ), asked

    return make


def test_each_kind_of_silence_has_a_first_request_row_and_a_ttft_row(bench):
    pool = FakePool(SilentTargets.STOPPED, SilentTargets.CUT)

    def seconds(name, silence, number):
        if silence is SilentTargets.CUT and name == "behind":
            return 2.2
        return 2.0

    made, asked = bench(pool, seconds)
    rows = {row.what: row for row in made.rows()}
    assert list(rows) == [
        "pool.stopped.first",
        "pool.stopped.ttft",
        "pool.cut.first",
        "pool.cut.ttft",
    ]
    assert (rows["pool.stopped.ttft"].value, rows["pool.stopped.ttft"].ok) == (1.0, True)
    assert rows["pool.cut.ttft"].value == pytest.approx(1.1)
    assert rows["pool.cut.ttft"].ok is False
    assert rows["pool.cut.first"].value == pytest.approx(0.2)
    assert rows["pool.cut.ttft"].more["rounds"] == 4
    prompts = [prompt for name, silence, prompt in asked if name == "behind"]
    assert len(set(prompts)) == len(prompts) == 1 + 2 * (FALLS + 4) + 2 * FALLS * 3, "all are new"
    assert [len(prompt) for prompt in prompts].count(PROMPT_TOKENS) == 1 + 2 * (FALLS + 4)
    alone = [prompt for name, silence, prompt in asked if name == "alone"]
    assert len(set(alone)) == len(alone), "its own cache has none of them"
    assert len(pool.told) == 1, "the pool was written to before"


def test_each_engine_goes_first_in_turn_and_rounds_are_shared_out(bench):
    made, asked = bench(FakePool(SilentTargets.STOPPED), lambda *_: 2.0)
    list(made.rows())
    names = [name for name, _, prompt in asked if len(prompt) == PROMPT_TOKENS]
    fall = ["alone", "behind", "alone"]
    pair, other = ["alone", "behind"], ["behind", "alone"]
    assert names == [*pair, *fall, *pair, *other, *fall, *other, *fall, *pair]


def test_pairs_disturbed_by_other_processes_are_repeated(bench):
    """Whatever they took: what others have of the machine decides, not what comes of it."""
    shares = iter([0.0, 0.0, 0.3, 0.3, *[0.0] * 100])  # each pair is looked at before and behind
    pairs = iter(range(100))

    def others():
        return next(shares)

    def seconds(name, silence, number):
        return 2.0 + 0.01 * next(pairs)

    made, asked = bench(FakePool(SilentTargets.STOPPED), seconds, others)
    row = list(made.rows())[1]
    assert (row.more["rounds"], row.more["disturbed"]) == (4, 1)
    names = [name for name, _, prompt in asked if len(prompt) == PROMPT_TOKENS]
    assert names.count("behind") == 1 + FALLS + 5


def test_the_least_disturbed_pairs_count_on_a_machine_that_is_always_busy(bench):
    ticks = iter(range(1000))
    made, _ = bench(
        FakePool(SilentTargets.STOPPED), lambda *_: 2.0, lambda: 0.1 + next(ticks) / 1000
    )
    row = list(made.rows())[1]
    assert (row.value, row.more["rounds"], row.more["disturbed"]) == (1.0, 4, 4)


def test_one_slow_first_request_does_not_change_the_first_request_row(bench):
    waits = iter([0.3, 9.0, 0.2])

    def seconds(name, silence, number):
        meets = silence is not None and name == "behind" and pool.met == 1
        return 2.0 + (next(waits) if meets else 0.0)

    pool = FakePool(SilentTargets.STOPPED)
    made, _ = bench(pool, seconds)
    row = next(made.rows())
    assert row.value == pytest.approx(0.3)
    assert row.more["worst_s"] == pytest.approx(9.0)


def test_a_measurement_fails_if_the_pool_is_not_detected_as_silent(bench, monkeypatch):
    monkeypatch.setattr(silent_pool, "OPEN_S", 0.05)
    pool = FakePool(SilentTargets.STOPPED)
    made, _ = bench(pool, lambda *_: 1.0)
    node = SimpleNamespace(
        members=lambda: [{"phase": phase, "ejected": False} for phase in ("closed", "closed")],
        process=SimpleNamespace(
            name="node", check=lambda: None, log="x", tail=lambda: "", running=True
        ),
    )
    monkeypatch.setattr(made, "_node", node)
    with pytest.raises(HoldfastError, match="sure that its pool is silent"):
        list(made.rows())


def test_ports_of_one_machine_can_not_be_cut_off():
    with pytest.raises(HoldfastError, match="run as root"):
        LoopbackNetwork().cut("tcp://127.0.0.1:1")
