"""The crash campaign counts as a kill what was one, and knows who did it."""

import os
import signal

import pytest

from holdfast.errors import ConfigError
from holdfast_bench.campaigns import crash, crash_node
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult


@pytest.fixture
def budget(tmp_path):
    return CampaignBudget(tries=6, seed=1, folder=tmp_path)


def test_a_kill_by_the_campaign_is_not_counted_as_a_failpoint_kill(budget, monkeypatch):
    monkeypatch.setattr(crash_node, "_POINT_S", 60.0)
    result = crash_node.kill_nodes(budget)
    assert result.failures == []
    assert result.tried == 6
    points = crash_node.POINTS
    assert result.counts["at any moment"] == 3
    assert [result.counts[f"at {point}"] for point in points] == [1, 1, 1, 0, 0, 0, 0]


def test_a_folder_too_long_for_a_socket_is_refused_before_any_node_is_started(budget):
    with pytest.raises(ConfigError, match="a Unix socket allows 107; choose a shorter folder"):
        crash_node.kill_nodes(budget._replace(folder=budget.folder / ("long" * 25)))


def test_a_failpoint_that_never_kills_is_reported(budget, monkeypatch):
    process = crash_node.NodeProcess
    monkeypatch.setattr(crash_node, "NodeProcess", lambda folder, _: process(folder))
    monkeypatch.setattr(crash_node, "POINTS", crash_node.POINTS[:2])
    monkeypatch.setattr(crash_node, "POINTS_PROVEN_AT", 2)
    monkeypatch.setattr(crash_node, "_POINT_S", 0.01)
    result = crash_node.kill_nodes(budget._replace(tries=4))
    assert [words for words in result.failures if "failpoint" in words] == [
        "failpoint extent_write never killed",
        "failpoint region_close never killed",
    ]


@pytest.mark.parametrize(
    ("status", "by_itself", "point", "tried", "failed"),
    [
        (-signal.SIGKILL, True, "region_close", 1, 0),
        (-signal.SIGKILL, False, "region_close", 1, 0),
        (-signal.SIGKILL, False, "", 1, 0),
        (-signal.SIGKILL, True, "", 1, 1),
        (-signal.SIGSEGV, True, "region_close", 0, 1),
        (1, True, "", 0, 1),
    ],
)
def test_only_an_intended_kill_is_not_a_failure(status, by_itself, point, tried, failed):
    result = CampaignResult("crash.node", "kills")
    ending = crash_node.ProcessEnding(status, by_itself)
    crash_node._count(result, "cycle 0", point, "at any moment", ending)
    assert (result.tried, result.failed) == (tried, failed)
    assert result.counts["at region_close"] == (by_itself and point == "region_close")


def test_a_store_ended_by_another_signal_is_not_counted_as_killed(budget, monkeypatch):
    class Broken(crash.Contexts):
        def save(self, keys):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(crash, "Contexts", Broken)
    monkeypatch.setattr(crash.failpoints, "POINTS", ("commit_packed",))
    lives = iter(range(3))
    budget = budget._replace(stopped=lambda: next(lives, None) is None)
    result = crash.kill_stores(budget)
    assert any("ended with -15" in words for words in result.failures)
    assert result.counts["at commit_packed"] == 0
