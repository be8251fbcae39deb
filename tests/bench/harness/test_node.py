"""A real node is started, asked, killed and started again."""

import pytest

from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with NodeUnderTest(
        tmp_path_factory.mktemp("n"), host_bytes=32 * MIB, disk_bytes=64 * MIB
    ) as node:
        yield node


def test_a_node_under_test_has_a_host_and_a_disk_tier(node):
    tiers = {tier["tier"]: tier["capacity_bytes"] for tier in node.status()["tiers"]}
    assert set(tiers) == {"host", "disk"}
    assert tiers["host"] == 32 * MIB


def test_a_restarted_node_has_another_process_and_incarnation(node):
    pid, incarnation = node.process.pid, node.status()["incarnation"]
    node.restart()
    assert node.process.pid != pid
    assert node.status()["incarnation"] != incarnation


def test_an_empty_node_has_nothing_on_disk_and_nothing_to_write(node):
    node.wait_idle()
    node.wait_on_disk(0)
    assert node.blocks_on_disk() == 0
    assert (node.last_plan(), node.plan_after(0)) == (0, None)
    with pytest.raises(HoldfastError, match="saved no block"):
        node.token_bytes()


def test_a_node_that_cannot_start_shows_why_and_leaves_no_process(tmp_path):
    with pytest.raises(HoldfastError, match=r"the node ended with status 2(.|\n)*capacity"):
        NodeUnderTest(tmp_path, host_bytes=1)
