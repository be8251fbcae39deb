"""A node's memory stays within its capacity, whatever its clients do with what they have mapped."""

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.wire.local import messages as m

MIB = 1 << 20
CAPACITY = 64 * MIB


def arena_bytes(process):
    """The memory that the kernel holds for all arenas of a node."""
    total = 0
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:holdfast" in str(link.readlink()):
                total += 512 * link.stat().st_blocks
    return total


def touch_all(engine):
    """Write one byte to every page of the arena that a client has mapped."""
    np.frombuffer(engine.client.arena.view, np.uint8)[::4096] = 1


@pytest.fixture
def node(start_node, tmp_path):
    """A node with a host tier and four domains, each with a key of its own."""
    domains = {}
    for name in ("one", "two", "three", "four"):
        file = tmp_path / f"{name}.key"
        file.write_bytes(os.urandom(32))
        file.chmod(0o600)
        domains[name] = {"key_file": str(file), "seal": False}
    return start_node(tiers=[{"kind": "host", "capacity": CAPACITY}], domains=domains)


def until_within_capacity(node):
    end = time.monotonic() + 60
    while (held := arena_bytes(node.process)) > CAPACITY:
        assert time.monotonic() < end, f"{held} bytes of {CAPACITY}"
        time.sleep(0.02)


def test_memory_that_clients_touched_is_reclaimed_when_they_disconnect(node, engine, names):
    kept = engine(node.address, domain="one")
    assert kept.save(names("kept", 100)) == 100
    for domain in ("one", "two", "three", "four"):
        client = engine(node.address, domain=domain)
        if domain != "one":
            touch_all(client)
        client.close()
    until_within_capacity(node)
    assert kept.read(names("kept", 100)) == (100, {"host": 100})


def test_memory_that_connected_clients_touch_is_reclaimed_and_counted(node, engine):
    clients = [engine(node.address, domain=domain) for domain in ("one", "two", "three", "four")]
    for client in clients:
        touch_all(client)
    until_within_capacity(node)
    clients[0].until(lambda status: status["memory"]["reclaimed_bytes"] >= 2 * CAPACITY)
    memory = clients[0].status()["memory"]
    assert memory["capacity_bytes"] == CAPACITY
    assert memory["resident_bytes"] <= CAPACITY
    assert "no slot covers" in node.said()


def test_memory_that_is_written_after_an_abort_is_reclaimed(node, engine, names):
    clients = [engine(node.address, domain=domain) for domain in ("one", "two")]
    for client in clients:
        keys = names(client, 4000)
        reserved = client.reserve(keys)
        assert sum(place >= 0 for place in reserved.places) * 24_576 > CAPACITY // 3
        client.call(m.Abort(reserved.ticket))
        client.fill(keys, reserved)
        client.fill(keys, client.reserve(keys))
    until_within_capacity(node)


def test_slots_that_clients_fill_keep_their_bytes_while_memory_is_reclaimed(node, engine, names):
    one, two = engine(node.address, domain="one"), engine(node.address, domain="two")
    keys = names("filled", 200)
    reserved = one.reserve(keys)
    one.fill(keys, reserved)
    touch_all(two)
    until_within_capacity(node)
    assert one.call(m.Commit(reserved.ticket)).blocks == 200
    assert one.read(keys) == (200, {"host": 200})
