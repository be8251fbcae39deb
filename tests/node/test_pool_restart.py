"""Hosts that start while a pool changes find what running hosts find, on real targets."""

import json
import subprocess
import sys
import time

import pytest

from holdfast.probe import free_port
from holdfast.wire.local import messages as m

CONTEXTS, BLOCKS = 100, 16


class Pool:
    """Targets, a members file and hosts; one context is one segment."""

    def __init__(self, folder, start_node, engine):
        self.folder, self.start_node, self.engine = folder, start_node, engine
        self.members = folder / "members.yaml"
        self.key = folder / "domain.key"
        self.key.write_bytes(bytes(range(32)))
        self.key.chmod(0o600)
        self.targets = {}

    def add_target(self, name):
        address = f"tcp://127.0.0.1:{free_port()}"
        tiers = [{"kind": "host", "capacity": "128 MiB"}]
        self.targets[name] = self.start_node(self.folder / name, listen=address, tiers=tiers)

    def announce(self):
        listed = [{"id": name, "address": node.address} for name, node in self.targets.items()]
        fresh = self.members.with_suffix(".new")
        fresh.write_text(json.dumps({"members": listed}))
        fresh.rename(self.members)

    def drain(self, name):
        command = [sys.executable, "-m", "holdfast", "pool", "drain", name]
        subprocess.run([*command, "--members", str(self.members)], check=True)

    def host(self, name, **settings):
        node = self.start_node(
            self.folder / name,
            tiers=[
                {"kind": "host", "capacity": "64 MiB"},
                {
                    "kind": "pool",
                    "members": str(self.members),
                    "deadline_s": 60.0,
                    "ask_s": 60.0,
                },
            ],
            domains={"default": {"key_file": str(self.key), "seal": False}},
            segment_blocks=BLOCKS,
            **settings,
        )
        return node, self.engine(node.address)

    def until_seen(self, engine, members, table=()):
        end = time.monotonic() + 60
        while True:
            seen = engine.call(m.Members()).data["shared"][0]["members"]
            if len(seen) == members and {member["state"] for member in seen} >= set(table):
                return
            assert time.monotonic() < end, seen
            time.sleep(0.05)


@pytest.fixture
def pool(tmp_path, start_node, engine):
    made = Pool(tmp_path, start_node, engine)
    for name in ("flash-1", "flash-2", "flash-3"):
        made.add_target(name)
    made.announce()
    return made


@pytest.fixture
def contexts(names):
    return [names(f"context {number}", BLOCKS) for number in range(CONTEXTS)]


def saved(engine, contexts):
    for keys in contexts:
        assert engine.save(keys) == BLOCKS
    engine.until(lambda status: status["waiting_to_write"] == 0)


def found(engine, contexts):
    return sum(engine.cover(keys) for keys in contexts)


def test_hosts_started_or_restarted_during_a_drain_find_every_context(pool, contexts):
    writer, a = pool.host("a")
    pool.until_seen(a, 3)
    saved(a, contexts)
    a.close()
    writer.stop()  # or it would write what it has in memory to the new owners
    pool.drain("flash-2")
    node, fresh = pool.host("fresh")
    pool.until_seen(fresh, 3, ["draining"])
    assert found(fresh, contexts) == CONTEXTS * BLOCKS
    assert fresh.read(contexts[0]) == (BLOCKS, {"pool": BLOCKS})
    fresh.close()
    node.stop()
    node.start()
    again = pool.engine(node.address)
    pool.until_seen(again, 3, ["draining"])
    assert found(again, contexts) == CONTEXTS * BLOCKS


def test_a_host_that_starts_after_a_join_finds_everything(pool, contexts):
    _, a = pool.host("a")
    pool.until_seen(a, 3)
    saved(a, contexts)
    pool.add_target("flash-4")
    pool.announce()
    pool.until_seen(a, 4)
    _, fresh = pool.host("fresh")
    pool.until_seen(fresh, 4)
    assert found(fresh, contexts) == CONTEXTS * BLOCKS
