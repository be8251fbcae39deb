"""CXL memory is found, checked, bound to its node and mapped."""

import ctypes
import os
import platform
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, Outcome
from holdfast.testing.tier_contract import Blocks
from holdfast.tiers.base import TierPut
from holdfast.tiers.cxl import medium
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.medium import DaxArena, NodeArena, describe, open_arena
from holdfast.tiers.cxl.tier import CxlTier

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def system(tmp_path):
    """The sysfs of a machine with two nodes, the second without processors, and a DAX device."""
    nodes = tmp_path / "devices/system/node"
    for number, processors in enumerate(["0-31", ""]):
        node = nodes / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{processors}\n")
        (node / "meminfo").write_text(
            f"Node {number} MemTotal:       {512 * MIB // 1024 * 1024} kB\n"
            f"Node {number} MemFree:        {256 * MIB} kB\n"
        )
    dax = tmp_path / "bus/dax/devices/null"
    dax.mkdir(parents=True)
    (dax / "size").write_text(f"{8 * GIB}\n")
    (dax / "align").write_text(f"{2 * MIB}\n")
    return tmp_path


def refused(options, system):
    with pytest.raises(ConfigError) as caught:
        open_arena(options, "tiers.1", system)
    return str(caught.value)


def test_a_node_without_processors_is_described(system):
    assert (
        describe(CxlOptions(capacity=GIB, node=1), "tiers.1", system)
        == "node 1 of 512 GiB, 256 GiB free"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            CxlOptions(capacity=GIB, node=7),
            "tiers.1.node: node 7 does not exist; this machine has the nodes 0, 1; choose a node",
        ),
        (
            CxlOptions(capacity=GIB, node=0),
            "tiers.1.node: node 0 has the processors 0-31, so its memory is ordinary host memory; ",
        ),
        (
            CxlOptions(capacity=300 * GIB, node=1),
            "tiers.1.capacity: 300 GiB requested, node 1 has 256 GiB free of 512 GiB; lower it",
        ),
        (
            CxlOptions(capacity=GIB, device="/dev/dax9.9"),
            "tiers.1.device: '/dev/dax9.9' cannot be found: No such file or directory; daxctl",
        ),
        (
            CxlOptions(capacity=GIB, device="/dev/zero"),
            "tiers.1.device: '/dev/zero' is not a DAX device; name a /dev/daxX.Y",
        ),
        (
            CxlOptions(capacity=9 * GIB, device="/dev/null"),
            "tiers.1.capacity: 9 GiB requested, '/dev/null' has 8 GiB; lower it",
        ),
        (
            CxlOptions(capacity=GIB + 4096, device="/dev/null"),
            "is not a multiple of the alignment of '/dev/null', 2097152 bytes; lower it by 4096",
        ),
    ],
)
def test_impossible_options_are_refused_with_value_limit_and_remedy(system, options, words):
    assert words in refused(options, system)


def test_a_device_without_permission_is_refused(system, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    words = refused(CxlOptions(capacity=GIB, device="/dev/null"), system)
    assert "'/dev/null' is not readable and writable for user" in words
    assert words.endswith("chown it")


def test_a_device_that_cannot_be_mapped_is_refused(system):
    words = refused(CxlOptions(capacity=GIB, device="/dev/null"), system)
    assert "tiers.1.device: '/dev/null' cannot be mapped: No such device; stop" in words


def test_a_node_that_the_process_may_not_use_is_refused(system):
    """A node exists in the made-up sysfs; the kernel refuses it."""
    there = {int(node.name[4:]) for node in Path("/sys/devices/system/node").glob("node[0-9]*")}
    absent = next(number for number in range(1, 64) if number not in there)
    nodes = system / "devices/system/node"
    (nodes / "node1").rename(nodes / f"node{absent}")
    words = refused(CxlOptions(capacity=MIB, node=absent), system)
    assert f"tiers.1.node: memory cannot be bound to node {absent}: " in words


def test_an_architecture_without_a_known_system_call_is_refused(system, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert "number of mbind unknown on pdp11" in refused(CxlOptions(capacity=MIB, node=1), system)


def test_memory_is_bound_before_it_is_touched():
    """The kernel's policy of the mapping is to bind it to the requested node."""
    try:
        arena = NodeArena(MIB, 0)
    except OSError as error:
        pytest.skip(f"mbind refused here: {error}")
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    start = ctypes.addressof(ctypes.c_char.from_buffer(arena.view))
    call = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    of_address = 2
    assert not libc.syscall(
        call, ctypes.byref(mode), mask, ctypes.c_ulong(1025), ctypes.c_void_p(start), of_address
    )
    assert (mode.value, mask[0]) == (medium._MPOL_BIND, 1)


def test_a_mapped_device_holds_records(tmp_path, monkeypatch):
    """A file replaces the device: the mapping and the code above it are the same."""
    file = tmp_path / "dax0.0"
    file.write_bytes(bytes(4 * MIB))
    monkeypatch.setattr(
        "holdfast.tiers.cxl.tier.open_arena", lambda options, _: DaxArena(options.device, 4 * MIB)
    )
    tier = CxlTier(CxlOptions(capacity=4 * MIB, device=str(file)))
    blocks = Blocks(60_000)
    places = blocks.save(tier, range(20))
    assert blocks.load(tier, range(20), places) == [Outcome.OK] * 20
    tier.free(places)
    [place] = tier.reserve([blocks.namespace.slot_bytes]).places
    assert tier.write([TierPut(place, blocks.record(50))]) == [Outcome.OK]
    assert blocks.load(tier, [50], [place]) == [Outcome.OK]
    assert b"".join([file.read_bytes()]).strip(b"\0")
    tier.close()
