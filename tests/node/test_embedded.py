"""Stores that programs open, over a pool of real targets: what one process saved, others get."""

import contextlib
import json
import subprocess
import sys
import time

import numpy as np
import pytest

import holdfast
from holdfast.errors import Outcome
from holdfast.probe import free_port
from holdfast.testing.embedded import fingerprint_for
from holdfast.wire.local import messages as m
from holdfast_bench.harness.pause import pause, resume

BLOCKS, BLOCK_TOKENS = 24, 32
TOKENS = list(range(7, 7 + BLOCKS * BLOCK_TOKENS))
LAYOUT = holdfast.Layout.portable(
    layers=2, kv_heads=2, head_size=16, dtype="float16", block_tokens=BLOCK_TOKENS
)
FINGERPRINT = fingerprint_for(LAYOUT)
PATIENT_S = 60.0
"""Longer than any test waits: only the caller's deadline ends a question."""

SAVE = """
import sys
sys.path.insert(0, sys.argv[1])
from test_embedded import BLOCKS, FINGERPRINT, TOKENS, payload, flush
import holdfast
with holdfast.open(sys.argv[2]) as store:
    assert store.session(FINGERPRINT).save(TOKENS, payload()) == BLOCKS
    flush(store)
"""


def payload():
    """What the blocks of the one context of these tests hold."""
    shape = (BLOCKS, LAYOUT.raw_bytes // 2)
    return np.random.default_rng(1).integers(0, 9_999, shape).astype(np.float16)


def flush(store):
    """Wait until everything is written to the pool."""
    end = time.monotonic() + 60
    while store.status().waiting_to_write:
        assert time.monotonic() < end
        time.sleep(0.01)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def in_memory(store):
    """How many leading blocks of the context lie in memory, verified."""
    session = store.session(FINGERPRINT)
    found = store.cover(session.namespace, session.chain(TOKENS).keys)
    return found.sources.get("host", 0)


class Pool:
    """Two targets, and configurations of hosts that use them."""

    def __init__(self, folder, start_node):
        self.folder = folder
        tiers = [{"kind": "host", "capacity": "32 MiB"}]
        self.targets = [
            start_node(folder / name, listen=f"tcp://127.0.0.1:{free_port()}", tiers=tiers)
            for name in ("t0", "t1")
        ]
        members = [
            {"id": f"t{at}", "address": node.address} for at, node in enumerate(self.targets)
        ]
        (folder / "members.yaml").write_text(json.dumps({"members": members}))
        (folder / "domain.key").write_bytes(bytes(range(32)))
        (folder / "domain.key").chmod(0o600)

    def settings(self, ask_s=PATIENT_S):
        return {
            "tiers": [
                {"kind": "host", "capacity": "32 MiB"},
                {
                    "kind": "pool",
                    "members": str(self.folder / "members.yaml"),
                    "deadline_s": PATIENT_S,
                    "ask_s": ask_s,
                },
            ],
            "domains": {"default": {"key_file": str(self.folder / "domain.key")}},
        }

    def config(self, name, **more):
        file = self.folder / f"{name}.yaml"
        listen = f"unix://{self.folder}/{name}.sock"
        file.write_text(json.dumps({"listen": listen, **self.settings(**more)}))
        return str(file)

    @contextlib.contextmanager
    def silent(self):
        """Have every target stand still."""
        for target in self.targets:
            pause(target.process.pid)
        try:
            yield
        finally:
            for target in self.targets:
                resume(target.process.pid)


@pytest.fixture
def pool(tmp_path, start_node):
    return Pool(tmp_path, start_node)


@pytest.fixture
def saved(pool):
    """A pool that holds the context, saved by a process that has ended."""
    folder = str(__file__).rpartition("/")[0]
    argv = [sys.executable, "-c", SAVE, folder, pool.config("writer")]
    subprocess.run(argv, check=True, timeout=120)
    return pool


def covered(session):
    """Ask until a busy machine has answered in time."""
    until(lambda: session.cover(TOKENS) == len(TOKENS))
    return session


def test_a_context_saved_by_one_process_is_fetched_by_another(saved):
    with holdfast.open(saved.config("reader")) as store:
        session, found = covered(store.session(FINGERPRINT)), np.zeros_like(payload())
        landed = session.fetch(TOKENS, into=found, deadline_s=60.0)
        assert (landed.outcome, landed.sources) == (Outcome.OK, {"pool": BLOCKS})
        assert (found == payload()).all()


def test_a_fetch_without_a_lookup_asks_the_pool(saved):
    with holdfast.open(saved.config("reader")) as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(payload())
        landed = session.fetch(TOKENS, into=found, deadline_s=60.0)
        while landed.outcome is Outcome.LATE:  # a busy machine: the question was late
            landed = session.fetch(TOKENS, into=found, deadline_s=60.0)
        assert (landed.tokens, landed.outcome) == (len(TOKENS), Outcome.OK)
        assert (found == payload()).all()
        assert session.fetch([5] * 64, into=found[:2]).outcome in (Outcome.MISS, Outcome.LATE)


@pytest.fixture(params=["embedded", "node"])
def opened(request, saved, start_node):
    """Call to open a store that uses the pool: one in this process, or that of a node."""

    def make(**more):
        if request.param == "embedded":
            return holdfast.open(saved.config("reader", **more))
        node = start_node(saved.folder / "reader", **saved.settings(**more))
        return holdfast.open(node.address, domain="default")

    return make


def test_local_blocks_are_served_by_the_deadline_if_the_pool_is_silent(saved, opened):
    with opened() as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(payload())
        assert session.save(TOKENS[: 3 * BLOCK_TOKENS], payload()[:3]) == 3
        with saved.silent():
            assert session.cover(TOKENS, deadline_s=0.2) == 3 * BLOCK_TOKENS
            landed = session.fetch(TOKENS, into=found, deadline_s=3.0)
            assert (landed.blocks, landed.outcome) == (3, Outcome.LATE)
            assert "pool did not answer in time" in landed.reason
            assert (found[:3] == payload()[:3]).all()
            assert session.prestage(TOKENS, deadline_s=0.2) == 3 * BLOCK_TOKENS
            assert session.pin(TOKENS, ttl_s=60.0, deadline_s=3.0) == 3 * BLOCK_TOKENS


def test_a_pool_that_does_not_answer_within_its_own_limit_is_late_not_a_miss(saved, opened):
    with opened(ask_s=0.1) as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(payload())
        with saved.silent():
            landed = session.fetch(TOKENS, into=found, deadline_s=4.0)
        assert (landed.blocks, landed.outcome) == (0, Outcome.LATE)
        assert landed.reason == "nothing is held here; pool did not answer in time"


def test_a_dead_pool_is_gone_and_local_blocks_are_served(saved, opened):
    with opened() as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(payload())
        session.save(TOKENS[: 3 * BLOCK_TOKENS], payload()[:3])
        for target in saved.targets:
            target.kill()

        def why_not_whole(tokens, into, blocks):
            landed = session.fetch(tokens, into=into, deadline_s=60.0)
            assert landed.blocks == blocks
            # On a busy machine the pool's members may fail after the lookup has ended.
            assert landed.outcome in (Outcome.GONE, Outcome.LATE)
            return landed.reason

        until(lambda: "pool cannot be reached" in why_not_whole(TOKENS, found, 3))
        until(
            lambda: why_not_whole(TOKENS, found, 3) and not store.status().shared["pool"].reachable
        )
        nothing = "nothing is held here; pool cannot be reached"
        until(lambda: why_not_whole([5] * 64, found[:2], 0) == nothing)


def test_prestage_reads_blocks_that_only_the_pool_holds(saved):
    with holdfast.open(saved.config("reader")) as store:
        session = store.session(FINGERPRINT)
        until(lambda: session.prestage(TOKENS) == len(TOKENS))
        until(lambda: in_memory(store) == BLOCKS)
        found = np.zeros_like(payload())
        assert session.fetch(TOKENS, into=found).sources == {"host": BLOCKS}
        assert (found == payload()).all()


def test_a_pin_holds_blocks_that_came_from_the_pool(saved):
    with holdfast.open(saved.config("reader")) as store:
        session = store.session(FINGERPRINT)
        until(lambda: session.pin(TOKENS, ttl_s=600.0) == len(TOKENS))
        assert in_memory(store) == BLOCKS
        size = session.namespace.slot_bytes
        assert store.status().hints.pinned_bytes == BLOCKS * size


def test_a_returns_hint_reads_blocks_that_only_the_pool_holds(saved):
    with holdfast.open(saved.config("reader")) as store:
        session = store.session(FINGERPRINT)
        session.follow(TOKENS, "chat-1")
        until(lambda: session.returns("chat-1", in_s=0.0) == BLOCKS)
        until(lambda: in_memory(store) == BLOCKS)


def up(engine, keys):
    """How many leading blocks of a chain lie in a node's memory, verified."""
    return engine.call(m.Cover(b"".join(keys))).sources.get("host", 0)


@pytest.fixture
def hosts(pool, engine, start_node, names):
    """A host's engine that knows nothing, and the names of what only the pool holds."""
    writer, reader = (
        engine(start_node(pool.folder / name, **pool.settings()).address) for name in "ab"
    )
    keys = names("shared", 12)
    assert writer.save(keys) == 12
    writer.until(lambda status: status["waiting_to_write"] == 0)
    return reader, keys


def test_a_node_prestages_blocks_that_only_the_pool_holds(hosts):
    reader, keys = hosts
    until(lambda: reader.call(m.Prestage(b"".join(keys), 0.0)) == m.Hinted(12))
    until(lambda: up(reader, keys) == 12)
    assert reader.read(keys) == (12, {"host": 12})


def test_a_node_pins_blocks_that_only_the_pool_holds(hosts):
    reader, keys = hosts
    until(lambda: reader.call(m.Pin(b"".join(keys), 600.0)) == m.Hinted(12))
    assert up(reader, keys) == 12
    assert reader.status()["hints"]["pinned_bytes"] > 0


def test_a_node_asks_the_pool_for_blocks_after_a_public_prefix(pool, engine, start_node, names):
    secrets = {"key_file": "commons.key", "publish_file": "publish.key"}
    for number, name in enumerate(secrets.values()):
        (pool.folder / name).write_bytes(bytes([number]) * 32)
        (pool.folder / name).chmod(0o600)
    settings = pool.settings() | {"keyring": str(pool.folder / "ring.json")}
    public = {key: str(pool.folder / name) for key, name in secrets.items()}
    settings["domains"]["commons"] = {"public": True, **public}
    one, other = (start_node(pool.folder / name, **settings) for name in "ab")
    own, common = names("own", 6), names("common", 3)
    writer = engine(one.address)
    assert writer.save(own) == 6
    writer.until(lambda status: status["waiting_to_write"] == 0)
    assert engine(other.address, domain="commons", publish=b"\1" * 32).save(common) == 3
    cover = m.Cover(b"".join(own), common=b"".join(common))
    covered = engine(other.address).call(cover)
    assert covered.blocks == 6 or "pool" in covered.unanswered  # it may be late on a busy machine


def test_a_hint_to_a_node_ends_at_its_deadline_if_the_pool_is_silent(saved, start_node):
    node = start_node(saved.folder / "node", **saved.settings())
    with holdfast.open(node.address, domain="default") as store:
        session = store.session(FINGERPRINT)
        assert session.save(TOKENS[: 3 * BLOCK_TOKENS], payload()[:3]) == 3
        covered(session)  # so the node knows that the pool holds the rest, and reads it
        with saved.silent():
            # Without a deadline of its own the node would read for longer than the client waits.
            assert session.pin(TOKENS, ttl_s=60.0, deadline_s=0.5) == 3 * BLOCK_TOKENS
            assert session.prestage(TOKENS, deadline_s=0.1) == len(TOKENS)


def test_a_returns_hint_to_a_node_reads_a_context_that_only_the_pool_holds(hosts):
    reader, keys = hosts
    packed = b"".join(keys)
    until(lambda: reader.call(m.Returns("chat-1", 0.0, packed)) == m.Hinted(12))
    until(lambda: up(reader, keys) == 12)
    assert reader.call(m.Closed("chat-1")) == m.Hinted(12)
