"""Every server sees the same loads, and each figure is compared with the fastest of the others."""

import json
from types import SimpleNamespace

import pytest

from holdfast.cli import main
from holdfast_bench.harness import model
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, TokenSources
from holdfast_bench.peers import lmcache_server
from holdfast_bench.scenarios import serving_comparison, serving_loads
from holdfast_bench.scenarios.serving_comparison import (
    QUICK_LOADS,
    SavedBytes,
    ServeLoads,
    ServeSettings,
    serve_rows,
)

SECONDS = {"vllm": 4.0, "native": 2.0, "lmcache": 3.0, "holdfast": 1.0}
"""Seconds to the first token of every prompt, by server."""


class FakeServer:
    """Answers after the seconds of its name; `whole`: it has kept every context."""

    def __init__(self, name, whole):
        self.name, self.seconds, self.whole, self.prompts = name, SECONDS[name], whole, []

    def reset_prefix_cache(self):
        pass

    def answer(self, prompt, max_tokens):
        self.prompts.append(list(prompt))
        return CompletionAnswer((7,) * max_tokens, (), self.seconds)


class FakeServers:
    """Saves twice the bytes of LMCache with Holdfast, and half of them on its drive."""

    def __init__(self, names, missing):
        self.folder = None
        self.by_name = {name: FakeServer(name, name not in missing) for name in names}
        self.saved = 0

    def in_turn(self, number):
        yield from self.by_name.items()

    def saved_bytes(self):
        self.saved += 100
        return {
            "holdfast": SavedBytes(2 * self.saved, self.saved),
            "lmcache": SavedBytes(self.saved, 0),
        }


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return the rows of servers that are not real, by name, and the servers."""

    def run(missing=(), loads=QUICK_LOADS):
        servers = FakeServers(SECONDS, missing)
        monkeypatch.setattr(serving_comparison, "Servers", lambda *_: servers)
        monkeypatch.setattr(lmcache_server, "installed", lambda: True)

        def ask(engine, prompt, max_tokens):
            fetched = {"host": len(prompt) if engine.whole else 0}
            answer = engine.answer(prompt, max_tokens)
            return MeasuredCompletion(answer, TokenSources(len(prompt), 0, fetched))

        monkeypatch.setattr(serving_comparison, "ask", ask)
        monkeypatch.setattr(serving_comparison, "fetched_tokens", lambda _: 512)
        monkeypatch.setattr(serving_loads, "complete", lambda engine, *asked: engine.answer(*asked))
        monkeypatch.setattr(
            serving_comparison,
            "run_prefix_repetition",
            lambda engine, *_: SimpleNamespace(mean_s=engine.seconds, p90_s=engine.seconds),
        )
        shape = model.SHAPES["tiny"]
        settings = ServeSettings(tmp_path, shape, 5, loads, lambda _: None)
        return {row.what: row for row in serve_rows(tmp_path, settings)}, servers

    return run


def test_a_figure_is_compared_with_the_fastest_of_the_others(measured):
    rows, _ = measured()
    row = rows["serve.warm.1024"]
    assert (row.value, row.more["best_peer"], row.ok) == (2.0, "native", True)
    assert {name: row.more[f"{name}_s"] for name in SECONDS} == SECONDS
    assert "CPU worker is the bench's" in row.more["native_is"]
    assert rows["serve.sessions.2.later.p90"].value == 2.0
    assert rows["serve.prefix_repetition.mean"].value == 2.0


def test_first_turns_and_crowds_are_compared_with_vllm_alone(measured):
    rows, _ = measured()
    assert rows["serve.sessions.2.first.mean"].value == 0.25
    assert rows["serve.crowd.8.p99"].value == 0.25


def test_bytes_saved_are_compared_with_lmcache(measured):
    row = measured()[0]["serve.sessions.2.saved"]
    assert (row.value, row.goal, row.ok) == (2.0, 1.0, False)
    assert (row.more["lmcache_bytes"], row.more["holdfast_drive_bytes"]) == (100, 100)


def test_a_server_that_has_lost_a_warm_context_is_named_with_its_misses(measured):
    more = measured(missing=["lmcache"])[0]["serve.warm.1024"].more
    assert more["lmcache_missed"] == 5
    assert "holdfast_missed" not in more


def test_every_server_gets_the_same_prompts(measured):
    _, servers = measured()
    first, *others = (sorted(server.prompts) for server in servers.by_name.values())
    assert all(each == first for each in others)


def test_an_engine_s_own_cache_holds_three_sessions_and_any_context_of_the_loads():
    loads = ServeLoads()
    assert 3 <= loads.cache_tokens // loads.sessions.longest < 4
    assert loads.cache_tokens > loads.context_tokens > max(loads.warm_tokens)


def test_without_lmcache_a_row_says_how_to_install_it(measured, monkeypatch, tmp_path):
    measured()
    monkeypatch.setattr(lmcache_server, "installed", lambda: False)
    settings = ServeSettings(tmp_path, model.SHAPES["tiny"], 5, QUICK_LOADS, lambda _: None)
    [row, *_] = serve_rows(tmp_path, settings)
    assert (row.what, row.value) == ("serve.lmcache", None)
    assert "make lmcache" in row.more["why"]


@pytest.mark.soak
@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_the_quick_bench_measures_real_servers(tmp_path):
    pytest.importorskip("vllm")
    target = tmp_path / "serve.json"
    main(["bench", "serve", "--quick", "--rounds", "5", "--json", str(target)])
    rows = {row["what"]: row for row in json.loads(target.read_text())["rows"]}
    assert rows["serve.warm.1024"]["holdfast_s"] > 0
    assert rows["serve.warm.1024"]["native_s"] > 0
    assert {f"serve.prefix_repetition.{figure}" for figure in ("mean", "p90")} <= rows.keys()
    assert "serve.crowd.8.p99" in rows
