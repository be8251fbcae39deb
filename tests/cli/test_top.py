"""`holdfast top`: views of a running node."""

import inspect
import re

import pytest

from holdfast import metrics
from holdfast.cli import stats, top
from holdfast.cli.top import _page_locks, _requests, _tables
from holdfast.node.http import pages
from holdfast.status import (
    DomainStatus,
    EngineLockStatus,
    MemberStatus,
    NodeStatus,
    PageLockStatus,
    SharedTierStatus,
    TierStatus,
)
from holdfast.store import activity


def test_top_prints_successive_views_to_a_pipe(holdfast, node, save):
    save(node, 3).close()
    done = holdfast("top", "--node", node, "--views", 2, "--every", 0.1)
    assert done.returncode == 0, done.stderr
    views = done.stdout.split("since start")[1:]
    assert len(views) == 2
    assert re.search(r"host +\d+ % +16 MiB +3 ", views[1])
    assert "/s" in views[1]
    assert "waiting writes" in views[1]


def test_page_locked_memory_has_a_table_if_there_is_any():
    assert not _page_locks(NodeStatus()).rows
    locks = PageLockStatus([EngineLockStatus("vllm", "acme", 64 << 20, "ENOMEM")])
    domains = [DomainStatus("acme", locked_bytes=128 << 20, kept_bytes=1 << 20)]
    table = _page_locks(NodeStatus(domains=domains, page_locks=locks))
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["vllm", "acme", "64 MiB", "128 MiB", "1 MiB", "ENOMEM"]


def test_requests_to_an_object_store_have_a_table_with_their_price():
    assert not _requests(NodeStatus(tiers=[TierStatus("disk")])).rows
    counts = {"get": 1_200, "put": 3, "list": 4, "delete": 0}
    tiers = [TierStatus("object", requests=counts, request_dollars=12.5)]
    table = _requests(NodeStatus(tiers=tiers))
    assert [column.header for column in table.columns][1:5] == ["GET", "PUT", "LIST", "DELETE"]
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["object", "1,200", "3", "4", "0", "$12.50"]


def test_a_bucket_without_a_bound_shows_what_it_holds_and_that_it_is_out_of_reach():
    status = NodeStatus(
        tiers=[TierStatus("object", used_bytes=3 << 20)],
        shared={"object": SharedTierStatus(False, [MemberStatus("s3://b", trouble="403")])},
    )
    table = _tables(status, None)[0]
    cells = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert (cells["used"], cells["of"], cells["state"]) == ("3 MiB", "no bound", "out of reach")


def test_an_interval_out_of_bounds_is_refused(holdfast, node):
    done = holdfast("top", "--node", node, "--every", 0)
    assert done.returncode == 2
    assert "--every 0: is not from 0.1 to 3,600 seconds" in done.stderr
    done = holdfast("top", "--node", node, "--views", -1)
    assert done.returncode == 2
    assert "--views -1: is below 0; give 1 or more" in done.stderr


@pytest.mark.parametrize("module", [activity, metrics, pages, stats, top])
def test_a_jump_of_the_machines_clock_changes_no_rate(module):
    """Rates and durations come from clocks that do not jump, such as the node's uptime."""
    assert not re.search(r"\btime\.time(_ns)?\(|\bdatetime\b", inspect.getsource(module))
