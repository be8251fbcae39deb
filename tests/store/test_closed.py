"""A closed store accepts nothing and serves nothing; arguments of a wrong type are named."""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

import holdfast
from holdfast.errors import BlockError, Outcome, StoreClosedError
from holdfast.policy.retention import Retention
from holdfast.store import store as module
from holdfast.store import tier_writer
from holdfast.store.call_threads import OwnThreadCalls
from holdfast.store.store import Store
from holdfast.testing.embedded import FINGERPRINT, blocks_for, serves, tokens_for
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import header_of

MIB = 1 << 20


def test_a_closed_store_serves_nothing_and_accepts_nothing() -> None:
    with holdfast.open(host="16 MiB") as store:
        session = store.session(FINGERPRINT)
        serves(session, 1)
    found = np.full_like(blocks_for(1), 7)
    landed = session.fetch(tokens_for(1), into=found)
    assert (landed.tokens, landed.blocks, landed.sources) == (0, 0, {})
    assert landed.outcome is Outcome.GONE
    assert "closed" in landed.reason
    assert (found == 7).all()
    calls = (
        lambda: session.save(tokens_for(2), blocks_for(2)),
        lambda: session.cover(tokens_for(1)),
        lambda: session.pin(tokens_for(1), 1.0),
        lambda: session.prestage(tokens_for(1)),
        lambda: session.follow(tokens_for(1), "a"),
        lambda: session.closed("a"),
        lambda: session.returns("a", 1.0),
        lambda: store.session(FINGERPRINT),
        lambda: store.cover(session.namespace, []),
        lambda: store.held(session.namespace, []),
        lambda: store.drop("*"),
        store.verify,
        store.status,
        store.listing,
        store.domains,
    )
    for call in calls:
        with pytest.raises(StoreClosedError, match="closed; open it again"):
            call()
    store.close()  # once more is allowed


def test_leases_and_tickets_can_be_returned_to_a_closed_store(harness) -> None:
    one = harness()
    chain = one.chain(1, 3)
    one.save(chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 1.0)
    other = one.chain(2, 2)
    reserved = one.store.reserve(one.namespace, other.keys, other.parent(0), 0)
    one.store.close()
    assert not one.store.release(fetched.lease)
    one.store.abort(reserved.ticket)
    assert one.store.commit(reserved.ticket) == 0
    again = one.store.reserve(one.namespace, other.keys, other.parent(0), 0)
    assert (again.places, again.outcome) == ([-1, -1], Outcome.GONE)
    assert one.store.fetch(one.namespace, chain.keys, 1.0).outcome is Outcome.GONE
    assert one.store.fetch_unverified(one.namespace, chain.keys, 1.0).outcome is Outcome.GONE


def test_a_call_that_runs_during_a_close_gets_the_answer_of_a_closed_store(harness) -> None:
    one = harness(calls=OwnThreadCalls())
    chain, other = one.chain(1, 3), one.chain(2, 2)
    one.save(chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 1.0)
    reserved = one.store.reserve(one.namespace, other.keys, other.parent(0), 0)
    slots = one.store.receive_slots([header_of(one.namespace, key) for key in one.chain(3, 2).keys])
    one.store.calls.close(0.0)  # the first step of a close, after these calls saw an open store
    assert not one.store.gone
    assert not one.store.release(fetched.lease)
    assert one.store.commit(reserved.ticket) == 0
    one.store.abort(reserved.ticket)
    assert one.store.publish_received(slots) == [Outcome.GONE] * 2
    one.store.discard_received(slots)
    again = one.store.reserve(one.namespace, other.keys, other.parent(0), 0)
    assert (again.places, again.outcome) == ([-1, -1], Outcome.GONE)
    assert one.store.fetch(one.namespace, chain.keys, 1.0).outcome is Outcome.GONE


def test_a_close_while_threads_use_the_store_ends_and_logs_no_fault(tmp_path, caplog) -> None:
    wrong, ended = [], []

    def use(session, seed: int) -> None:
        found = np.zeros_like(blocks_for(seed))
        while True:
            try:
                session.save(tokens_for(seed), blocks_for(seed))
            except StoreClosedError:
                break
            landed = session.fetch(tokens_for(seed), into=found)
            good = (found[: landed.blocks] == blocks_for(seed)[: landed.blocks]).all()
            if not good:
                wrong.append(seed)
            seed += 10
        ended.append(seed)

    for _ in range(10):
        store = holdfast.open(host="16 MiB", disk="16 MiB", path=str(tmp_path))
        session = store.session(FINGERPRINT)
        users = [threading.Thread(target=use, args=(session, n)) for n in range(3)]
        for user in users:
            user.start()
        time.sleep(0.03)
        store.close()
        for user in users:
            user.join(60)
            assert not user.is_alive()
    assert not wrong
    assert len(ended) == 30
    assert not [record for record in caplog.records if record.exc_info]


class SlowTier(MemoryTier):
    """A tier whose writes take until they are told to end."""

    def __init__(self) -> None:
        super().__init__(64 * MIB)
        self.begun, self.over = threading.Event(), threading.Event()

    def write(self, batch):
        self.begun.set()
        self.over.wait(60)
        return super().write(batch)


def test_a_close_ends_in_bounded_time_if_a_tier_does_not_answer(harness, monkeypatch) -> None:
    monkeypatch.setattr(module, "CLOSE_STOP_S", 0.2)
    tier = SlowTier()
    one = harness(tier=tier)
    one.save(one.chain(1, 3))
    assert tier.begun.wait(60)
    closed = threading.Thread(target=one.store.close, args=(0.1,))
    closed.start()
    closed.join(60)
    assert not closed.is_alive()
    tier.over.set()


def test_a_close_writes_queued_blocks_for_a_bounded_time(harness, monkeypatch, caplog) -> None:
    monkeypatch.setattr(tier_writer, "_STOP_S", 0.2)
    tier = SlowTier()
    one = harness(64 * MIB, tier=tier)
    one.save(one.chain(1, 200))
    assert tier.begun.wait(60)
    one.store.close(0.1)
    assert tier.usage().records < 200
    tier.over.set()
    one.view.wait_until(lambda: one.view.waiting(1) == 0, "the writer ends")
    assert tier.usage().records < 200
    one.view.wait_until(lambda: "no time to write blocks=" in caplog.text, "the writer told of it")


@pytest.mark.parametrize("fingerprint", [None, "m", b"f" * 16, FINGERPRINT.representation])
def test_a_fingerprint_of_a_wrong_type_is_refused_by_name(fingerprint) -> None:
    with holdfast.open(host="16 MiB") as store:
        name, no_domain = type(fingerprint).__name__, cast("str", None)
        with pytest.raises(BlockError, match=f"fingerprint is of type {name}; pass a holdfast"):
            store.session(fingerprint)
        with pytest.raises(BlockError, match="domain is of type NoneType"):
            store.session(FINGERPRINT, domain=no_domain)


@pytest.mark.parametrize("seconds", [None, "1", float("nan"), -1, float("inf"), True, [1]])
def test_times_of_a_wrong_type_or_size_are_refused_by_name(seconds) -> None:
    with holdfast.open(host="16 MiB") as store:
        session, tokens = store.session(FINGERPRINT), tokens_for(1)
        with pytest.raises(BlockError, match="deadline_s"):
            session.fetch(tokens, into=blocks_for(1), deadline_s=seconds)
        with pytest.raises(BlockError, match="ttl_s"):
            session.pin(tokens, seconds)
        with pytest.raises(BlockError, match="in_s"):
            session.prestage(tokens, seconds)
        with pytest.raises(BlockError, match="in_s"):
            session.returns("a", seconds)


def test_other_arguments_of_a_wrong_type_are_refused_by_name() -> None:
    with holdfast.open(host="16 MiB") as store:
        session = store.session(FINGERPRINT)
        with pytest.raises(BlockError, match="retention is 'durable'"):
            session.save(tokens_for(1), blocks_for(1), cast("Retention", "durable"))
        for call in (session.closed, lambda name: session.follow(tokens_for(1), name)):
            with pytest.raises(BlockError, match="session is of type int"):
                call(cast("str", 1))
        for work in (session.cover, lambda tokens: session.pin(tokens, 1.0)):
            with pytest.raises(BlockError, match="tokens are of type NoneType"):
                work(cast("Sequence[int]", None))


SAVES = """
import sys, holdfast
from holdfast.testing.embedded import FINGERPRINT, blocks_for, tokens_for
store = holdfast.open(host="64 MiB", disk="128 MiB", path=sys.argv[1])
session = store.session(FINGERPRINT)
for seed in range(40):
    session.save(tokens_for(seed, 100), blocks_for(seed, 100))
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)], ids=repr
)
def test_a_process_that_ends_without_close_has_written_its_saved_blocks(
    end, status, tmp_path
) -> None:
    argv = [sys.executable, "-c", SAVES.format(end=end), str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.count("Traceback") == (end == "raise ValueError")
    with holdfast.open(host="64 MiB", disk="128 MiB", path=str(tmp_path)) as store:
        assert store.recovery.wait(60)
        session = store.session(FINGERPRINT)
        for seed in range(40):
            assert session.cover(tokens_for(seed, 100)) == 3_200
            found = np.zeros_like(blocks_for(seed, 100))
            assert session.fetch(tokens_for(seed, 100), found, deadline_s=60).blocks == 100
            assert (found == blocks_for(seed, 100)).all()


SAVES_SEALED = SAVES.replace('holdfast.open(host="64 MiB", disk="128 MiB", path=sys.argv[1])',
                             "holdfast.open(sys.argv[1])")  # fmt: skip


# Executors refuse new work from here on, and the process waits for this one's last work.
SLOW_END = """
from concurrent.futures import ThreadPoolExecutor
import time
ThreadPoolExecutor(1).submit(time.sleep, 2)
"""


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("raise ValueError", 1), (SLOW_END, 0)], ids=["", "raise", "slow"]
)
def test_a_sealed_store_that_was_not_closed_keeps_its_saved_blocks(end, status, tmp_path) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_bytes(b"k" * 32)
    file = tmp_path / "host.yaml"
    file.write_text(f"""
listen: unix://{tmp_path}/holdfast.sock
domains: {{default: {{key_file: {tmp_path}/key}}}}
keyring: {tmp_path}/ring.json
tiers: [{{kind: host, capacity: 64 MiB}}, {{kind: disk, path: {tmp_path}/tier, capacity: 128 MiB}}]
""")
    assert "sys.argv[1])" in SAVES_SEALED
    argv = [sys.executable, "-c", SAVES_SEALED.format(end=end), str(file)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.count("Traceback") == status, ended.stderr
    last = blocks_for(39, 100)[-1].tobytes()
    assert not any(last in path.read_bytes() for path in (tmp_path / "tier").iterdir())
    with holdfast.open(str(file)) as store:
        assert store.recovery.wait(60)
        session = store.session(FINGERPRINT)
        for seed in range(40):
            assert session.cover(tokens_for(seed, 100)) == 3_200
            found = np.zeros_like(blocks_for(seed, 100))
            assert session.fetch(tokens_for(seed, 100), found, deadline_s=60).blocks == 100
            assert (found == blocks_for(seed, 100)).all()


def test_a_store_that_was_never_started_closes() -> None:
    store = Store(4 * MIB, [], {"default": b"s" * 32})
    store.close()
    with pytest.raises(StoreClosedError):
        store.status()
