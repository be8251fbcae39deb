"""CXL memory in a configuration: where it is, its place on the ladder, and how much of it."""

import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError

HOST = {"kind": "host", "capacity": "64 MiB"}
CXL = {"kind": "cxl", "node": "any", "capacity": "32 MiB"}
DISK = {"kind": "disk", "path": "/data/blocks", "capacity": "1 GiB"}


def read(*tiers):
    return parse({"listen": "unix:///run/h/node.sock", "tiers": list(tiers)})


def test_cxl_memory_is_named_by_node_or_by_device():
    on_nodes = read(HOST, {**CXL, "node": 2}, {**CXL, "node": "3"}, CXL, DISK)
    assert [tier.node for tier in on_nodes.tiers[1:4]] == [2, 3, "any"]
    assert on_nodes.tier_names == ["host", "cxl", "cxl1", "cxl2", "disk3"]
    assert not on_nodes.shares
    on_a_device = read(HOST, {**CXL, "node": None, "device": "/dev/dax0.0"})
    assert on_a_device.tiers[1].device == "/dev/dax0.0"


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ([HOST, {**CXL, "node": None}], r"tiers\.1: neither node nor device given; name a node"),
        (
            [HOST, {**CXL, "device": "/dev/dax0.0"}],
            r"tiers\.1: node any and device '/dev/dax0\.0' given; name",
        ),
        ([HOST, {**CXL, "node": -3}], r"tiers\.1\.node: -3 is not a NUMA node"),
        (
            [HOST, {**CXL, "node": "some"}],
            r"tiers\.1\.node: 'some': .*; use one of: a number, any$",
        ),
        ([HOST, {**CXL, "capacity": 5}], r"tiers\.1\.capacity: 5 B is less than 16 MiB"),
        (
            [HOST, {**CXL, "capacity": "900 TiB"}],
            r"tiers\.1\.capacity: 900 TiB given together with the host tier, .*; lower it, or name",
        ),
        ([HOST, DISK, CXL], r"tiers\.2\.kind: 'cxl' is listed after 'disk'; put the fastest"),
        ([HOST, CXL, CXL], r"tiers\.2: 'any' is also the memory of tiers\.1; give that one"),
    ],
)
def test_invalid_cxl_options_are_refused(tiers, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        read(*tiers)
