"""`holdfast stats`: a node's savings in three lines."""

import contextlib
import json

import pytest

from holdfast.cli.stats import summary
from holdfast.errors import RefusedError
from holdfast.status import ActivityStatus, FailedChecks, NodeStatus
from holdfast.wire.local import messages as m

STATUS = NodeStatus(
    uptime_s=7_300.0,
    failed_checks=[FailedChecks("disk", "corrupt", 2), FailedChecks("pool", "unreadable", 5)],
    activity=ActivityStatus(
        prompts=1_000,
        tokens=200_000,
        engine_tokens=10_000,
        loaded_tokens={"host": 120_000, "disk": 18_000, "pool": 4_000},
        computed_tokens=48_000,
        calls={"lookup": {"ok": 1_200, "miss": 4}, "fetch": {"ok": 900, "late": 3}},
        saved_s=2_280.0,
    ),
)


def test_the_summary_says_where_tokens_came_from_and_what_was_saved():
    first, shares, last = summary(STATUS)
    assert first == "since start, 2 hours ago: 1,204 lookups, 1,000 prompts of 200,000 tokens"
    assert shares == (
        "71 % of prompt tokens from Holdfast (host 60 %, disk 9 %, pool 2 %), 5 % from the "
        "engines' own caches, 24 % computed"
    )
    assert last == (
        "38.0 engine-minutes saved (estimated time of computing less the measured time); "
        "2 corrupt, 3 late"
    )


def test_what_engines_report_is_shown(holdfast, node, save):
    prompts = [(64, 16, {"host": 32, "a tier of a newer engine": 8})]
    with contextlib.closing(save(node, 2)) as client:
        client.call(m.Observed([], prompts=prompts), m.Done, 10)
    done = holdfast("stats", "--node", node)
    assert "1 prompt of 64 tokens" in done.stdout
    assert "62 % of prompt tokens from Holdfast (host 50 %, other 12 %), 25 % from" in done.stdout
    told = json.loads(holdfast("stats", "--node", node, "--json", "-").stdout)
    assert told["activity"]["computed_tokens"] == 8
    assert holdfast("inspect", "--node", node).stdout.startswith("since start, ")


def test_counts_that_cannot_be_are_refused(holdfast, node, save):
    for prompt in ((10, 11, {}), (10, 0, {"host": 11}), (-1, 0, {}), (10, -5, {"host": 5})):
        with (
            contextlib.closing(save(node, 1)) as client,
            pytest.raises(RefusedError, match=r"observed\.prompts"),
        ):
            client.call(m.Observed([], prompts=[prompt]), m.Done, 10)
    assert "0 prompts of 0 tokens" in holdfast("stats", "--node", node).stdout


def test_without_a_node_it_says_so(holdfast, tmp_path):
    done = holdfast("stats", "--node", f"unix://{tmp_path}/none.sock")
    assert done.returncode == 4
