"""One session, whether the store is in this process or a node's: same methods, same outcomes."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast import Outcome, Retention
from holdfast.blocks.envelope import stored_bytes
from holdfast.client.session import CONNECT_S, LATE_S, RemoteSession
from holdfast.errors import BlockError, ConfigError, NodeGoneError, StoreClosedError
from holdfast.limits import CONNECTIONS_MAX, RESERVE_BLOCKS_MAX
from holdfast.node.local.recorder import RecordedRequest
from holdfast.session import Session
from holdfast.testing.embedded import (
    BLOCKS,
    FINGERPRINT,
    LAYOUT,
    blocks_for,
    fingerprint_for,
    serves,
    tokens_for,
)
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast_bench.harness.process import wait_until

TOKENS = BLOCKS * LAYOUT.block_tokens
RECORD = stored_bytes(LAYOUT.raw_bytes)


def listed(session, limit=4_096):
    """All keys of a session's namespace, and the lengths of the pages."""
    keys, lengths, start = [], [], 0
    while True:
        page = session.list_keys(start, limit)
        keys += page.keys
        lengths.append(len(page.keys))
        if not page.next:
            return keys, lengths
        start = page.next


def test_the_keys_of_a_namespace_are_listed_in_pages_and_those_of_others_are_not(store):
    session, other = store.session(FINGERPRINT), store.session(fingerprint_for(LAYOUT, "other"))
    assert listed(session) == ([], [0])
    expected = set()
    for seed in range(4):
        session.save(tokens_for(seed), blocks_for(seed))
        expected.update(session.chain(tokens_for(seed)).keys)
    other.save(tokens_for(9), blocks_for(9))
    keys, lengths = listed(session, 5)
    assert set(keys) == expected
    assert len(keys) == len(expected) == 4 * BLOCKS
    assert max(lengths) == 5
    assert set(listed(other)[0]) == set(other.chain(tokens_for(9)).keys)


@pytest.mark.parametrize(
    ("start", "limit", "named"),
    [(-1, 5, "start is -1"), (0, 0, "limit is 0"), (0, 4_097, "1 to 4096"), (0, True, "True")],
)
def test_a_page_of_keys_out_of_bounds_is_refused_by_name(store, start, limit, named):
    with pytest.raises(BlockError, match=named):
        store.session(FINGERPRINT).list_keys(start, limit)


class FakeNode:
    """A node that answers in this process.

    `connecting_s` keeps the timeouts of connecting to it, `waits_s` that of the last request of
    each kind. `fetched`: its answer to a fetch. While it `hangs`, it neither answers nor accepts
    connections.
    """

    def __init__(self):
        self.connecting_s, self.asked, self.waits_s = [], [], {}
        self.fetched = m.Fetched(0, [], {}, "miss", "evicted")
        self.hangs = False

    def connect(self, _address, _hello, timeout_s):
        self.connecting_s.append(timeout_s)
        self.check_answers()
        return FakeClient(self)

    def check_answers(self):
        if self.hangs:
            raise NodeGoneError("no answer")


class FakeClient:
    def __init__(self, node):
        self.welcome = m.Welcome(m.PROTOCOL, "fake", bytes(32), BLOCKS * RECORD)
        self.arena = SimpleNamespace(view=memoryview(bytearray(BLOCKS * RECORD)))
        self.closed = False
        self.send = node.asked.append
        self._node = node

    def call(self, message, kind, timeout_s):
        self._node.check_answers()
        self._node.waits_s[type(message)] = timeout_s
        self.send(message)
        replies = {
            m.Cover: m.Covered(BLOCKS, BLOCKS, {"host": BLOCKS}, plan=7),
            m.Fetch: self._node.fetched,
            m.Release: m.Released(True),
        }
        assert type(replies[type(message)]) is kind
        return replies[type(message)]

    def forget(self, request_id):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def fake_node(monkeypatch):
    fake = FakeNode()
    monkeypatch.setattr("holdfast.client.session.Client", fake.connect)
    return fake


def fetch(session, deadline_s=5.0):
    return session.fetch(tokens_for(1), into=np.zeros_like(blocks_for(1)), deadline_s=deadline_s)


def test_a_saved_context_is_covered_and_fetched(store):
    session = store.session(FINGERPRINT)
    assert session.cover(tokens_for(1)) == 0
    found = np.zeros_like(blocks_for(1))
    landed = session.fetch(tokens_for(1), into=found)
    assert (landed.tokens, landed.blocks, landed.outcome) == (0, 0, Outcome.MISS)
    assert session.save(tokens_for(1), blocks_for(1)) == BLOCKS
    assert session.save(tokens_for(1), blocks_for(1)) == 0
    assert session.cover(tokens_for(1)) == TOKENS
    landed = session.fetch(tokens_for(1), into=found)
    assert landed[:4] == (TOKENS, BLOCKS, {"host": BLOCKS}, Outcome.OK)
    assert (found == blocks_for(1)).all()


def test_a_deadline_may_be_longer_than_a_node_fetches(store):
    session, found = store.session(FINGERPRINT), np.zeros_like(blocks_for(1))
    session.save(tokens_for(1), blocks_for(1))
    landed = session.fetch(tokens_for(1), into=found, deadline_s=3_600.0)
    assert (landed.blocks, landed.outcome) == (BLOCKS, Outcome.OK)


def test_the_longest_held_prefix_is_fetched_and_the_rest_stays_as_it_is(store):
    session = store.session(FINGERPRINT)
    session.save(tokens_for(1), blocks_for(1))
    longer = [*tokens_for(1), *range(500_000, 500_000 + 2 * LAYOUT.block_tokens)]
    found = np.full((BLOCKS + 2, *blocks_for(1).shape[1:]), 7, np.float16)
    landed = session.fetch(longer, into=found)
    assert landed.blocks == BLOCKS
    assert (found[:BLOCKS] == blocks_for(1)).all()
    assert (found[BLOCKS:] == 7).all()


def test_a_context_longer_than_one_reservation_is_saved_whole(store):
    layout = holdfast.Layout.portable(
        layers=1, kv_heads=1, head_size=8, dtype="float16", block_tokens=1
    )
    model = fingerprint_for(layout, "small")
    count = RESERVE_BLOCKS_MAX + 10
    session, blocks = store.session(model), np.arange(count, dtype=np.uint32)
    blocks = np.repeat(blocks[:, None], layout.raw_bytes // 4, axis=1)
    assert session.save(list(range(count)), blocks) == count
    found = np.zeros_like(blocks)
    assert session.fetch(list(range(count)), into=found).blocks == count
    assert (found == blocks).all()


def test_arguments_are_checked_before_anything_is_sent(store):
    session = store.session(FINGERPRINT)
    with pytest.raises(BlockError, match="fill 3"):
        session.save(tokens_for(1), blocks_for(1)[:2])
    with pytest.raises(BlockError, match="retention"):
        session.save(tokens_for(1), blocks_for(1), "durable")
    readonly = blocks_for(1)
    readonly.flags.writeable = False
    with pytest.raises(BlockError, match="read-only"):
        session.fetch(tokens_for(1), into=readonly)
    with pytest.raises(BlockError, match="deadline_s"):
        session.cover(tokens_for(1), deadline_s=-1)
    for name in ("", "x" * 257):
        for hint in (partial(session.follow, tokens_for(1)), session.closed):
            with pytest.raises(BlockError, match=f"session: a name of {len(name)} characters"):
                hint(name)
    for fingerprint, domain in ((None, "default"), (FINGERPRINT, 3)):
        with pytest.raises(BlockError, match="session"):
            store.session(fingerprint, domain)
    with pytest.raises(ConfigError, match="nobody"):
        raise_as_config(lambda: store.session(FINGERPRINT, "nobody"))


def raise_as_config(work):
    """A node refuses a domain in the words of the embedded store's ConfigError."""
    try:
        work()
    except holdfast.HoldfastError as error:
        raise ConfigError(str(error)) from error


def test_hints_return_the_number_of_tokens_or_blocks_they_apply_to(store):
    session = store.session(FINGERPRINT)
    session.save(tokens_for(1), blocks_for(1), Retention.DURABLE)
    assert session.prestage(tokens_for(1)) == TOKENS
    assert session.pin(tokens_for(1), ttl_s=5) == TOKENS
    with pytest.raises(BlockError, match="ttl_s: 80000 is not from 0 to 3600 seconds"):
        session.pin(tokens_for(1), ttl_s=80_000)
    assert session.returns("chat", 1) == 0
    session.follow(tokens_for(1), "chat")
    assert session.returns("chat", 1) == BLOCKS
    assert session.closed("chat") == BLOCKS


def test_a_sync_returns_the_tokens_that_the_durable_tier_keeps(store):
    session = store.session(FINGERPRINT)
    session.save(tokens_for(1), blocks_for(1), Retention.DURABLE)
    assert session.sync(tokens_for(1)) == TOKENS
    assert session.sync(tokens_for(2)) == 0
    with pytest.raises(BlockError, match="sync: deadline_s"):
        session.sync(tokens_for(1), deadline_s=-1.0)


def test_the_deadline_of_a_hint_is_sent_within_the_bounds_of_a_node(node, monkeypatch):
    sent, call = [], Client.call

    def noted(one, message, kind, timeout_s):
        sent.append(message)
        return call(one, message, kind, timeout_s)

    monkeypatch.setattr(Client, "call", noted)
    with holdfast.open(node.address, domain="default") as store:
        session = store.session(FINGERPRINT)
        for deadline_s in (0.0, 2.0, 600.0):
            session.pin(tokens_for(1), ttl_s=5, deadline_s=deadline_s)
            session.prestage(tokens_for(1), deadline_s=deadline_s / 10)
    assert [each.deadline_s for each in sent if isinstance(each, m.Pin)] == [0.001, 2.0, 60.0]
    assert [each.deadline_s for each in sent if isinstance(each, m.Prestage)] == [0.001, 0.2, 1.0]


def test_many_threads_use_one_session(store):
    session = store.session(FINGERPRINT)
    failed = []

    def use(seed):
        try:
            for at in range(10):
                serves(session, 100 * seed + at)
        except BaseException as error:  # noqa: BLE001  # told below
            failed.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_sessions_that_are_no_longer_used_leave_no_connection_behind(store):
    for _ in range(CONNECTIONS_MAX + 10):
        store.session(FINGERPRINT)
    session = store.session(FINGERPRINT)
    serves(session, 1)


def test_a_closed_store_answers_gone_and_accepts_nothing(store):
    session = store.session(FINGERPRINT)
    serves(session, 1)
    store.close()
    found = np.full_like(blocks_for(1), 7)
    landed = session.fetch(tokens_for(1), into=found)
    assert (landed.blocks, landed.outcome) == (0, Outcome.GONE)
    assert "closed" in landed.reason
    assert (found == 7).all()
    for call in (
        lambda: session.save(tokens_for(2), blocks_for(2)),
        lambda: session.cover(tokens_for(1)),
        lambda: session.prestage(tokens_for(1)),
        lambda: store.session(FINGERPRINT),
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_status_and_listing_show_what_is_stored(store):
    serves(store.session(FINGERPRINT), 1)
    [entry] = store.listing()
    assert entry["fingerprint"] == FINGERPRINT.digest().hex()
    assert entry["blocks"] == BLOCKS
    assert store.status().tiers


def test_a_context_saved_by_one_process_is_fetched_by_another(node):
    code = (
        "import holdfast, sys\n"
        "from holdfast.testing.embedded import FINGERPRINT, blocks_for, tokens_for\n"
        "with holdfast.open(sys.argv[1], domain='default') as store:\n"
        "    print(store.session(FINGERPRINT).save(tokens_for(1), blocks_for(1)))\n"
    )
    argv = [sys.executable, "-c", code, node.address]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{BLOCKS}\n"
    with holdfast.open(node.address, domain="default") as store:
        found = np.zeros_like(blocks_for(1))
        assert store.session(FINGERPRINT).fetch(tokens_for(1), into=found).blocks == BLOCKS
        assert (found == blocks_for(1)).all()


def test_a_node_that_is_killed_is_gone_and_a_new_one_is_found(node):
    with holdfast.open(node.address, domain="default") as store:
        session = store.session(FINGERPRINT)
        serves(session, 1)
        node.process.kill()
        found = np.full_like(blocks_for(1), 7)
        landed = session.fetch(tokens_for(1), into=found)
        assert (landed.blocks, landed.outcome) == (0, Outcome.GONE)
        assert (found == 7).all()
        with pytest.raises(NodeGoneError):
            session.save(tokens_for(2), blocks_for(2))
        node.start()

        def back():
            with contextlib.suppress(NodeGoneError):
                return session.cover(tokens_for(3)) == 0
            return False

        wait_until(node.process, back, 60)
        serves(session, 3)


def test_a_save_fills_no_slots_that_may_be_those_of_other_blocks(node, monkeypatch):
    monkeypatch.setattr("holdfast.client.fresh_slots.FILL_S", -1.0)  # every slot is too old
    with holdfast.open(node.address, domain="default") as store:
        session = store.session(FINGERPRINT)
        with pytest.raises(NodeGoneError, match="before they could be filled"):
            session.save(tokens_for(1), blocks_for(1))
        monkeypatch.undo()
        assert session.cover(tokens_for(1)) == 0
        serves(session, 1)


def test_a_node_that_is_stopped_is_gone_and_serves_again_when_it_goes_on(node):
    with holdfast.open(node.address, domain="default") as store:
        session = store.session(FINGERPRINT)
        serves(session, 1)
        group = os.getpgid(node.process.pid)
        os.killpg(group, signal.SIGSTOP)
        try:
            landed = session.fetch(tokens_for(1), into=np.zeros_like(blocks_for(1)), deadline_s=0.2)
            assert (landed.blocks, landed.outcome) == (0, Outcome.GONE)
        finally:
            os.killpg(group, signal.SIGCONT)

        def back():
            with contextlib.suppress(NodeGoneError):
                return session.cover(tokens_for(1)) == TOKENS
            return False

        wait_until(node.process, back, 60)
        serves(session, 2)


def test_connecting_to_a_hanging_node_ends_at_the_deadline_of_the_fetch(fake_node, monkeypatch):
    monkeypatch.setattr("holdfast.client.session.RETRY_S", 3_600.0)
    session = Session(RemoteSession("unix:///none.sock", FINGERPRINT, "default"))
    fake_node.hangs = True
    for _ in range(3):
        assert fetch(session, deadline_s=0.7).outcome is Outcome.GONE
    # The first fetch had a connection, and opens no other to report its result.
    assert fake_node.connecting_s == [CONNECT_S, 0.7]


def test_a_fetch_does_not_wait_for_another_thread_that_reconnects(fake_node, monkeypatch):
    session = Session(RemoteSession("unix:///none.sock", FINGERPRINT, "default"))
    fake_node.hangs = True
    fetch(session)
    fake_node.hangs = False
    connecting, go = threading.Event(), threading.Event()

    def slow(address, hello, timeout_s):
        connecting.set()
        assert go.wait(60)
        return fake_node.connect(address, hello, timeout_s)

    monkeypatch.setattr("holdfast.client.session.Client", slow)
    other = threading.Thread(target=fetch, args=(session,))
    other.start()
    assert connecting.wait(60)
    landed = fetch(session, deadline_s=0.0)
    go.set()
    other.join()
    assert (landed.outcome, "another thread" in landed.reason) == (Outcome.GONE, True)


def test_only_a_fetch_asks_for_a_plan_and_it_reports_how_the_plan_ended(fake_node, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("holdfast.client.session.time", clock)
    places = [at * RECORD for at in range(BLOCKS)]
    fake_node.fetched = m.Fetched(3, places, {"host": BLOCKS}, "ok", "")
    session = Session(RemoteSession("unix:///none.sock", FINGERPRINT, "default"))
    assert session.cover(tokens_for(1)) == TOKENS
    session.follow(tokens_for(1), "chat")
    assert fetch(session).blocks == BLOCKS
    assert fake_node.waits_s[m.Release] <= 5.0 + LATE_S
    asked = fake_node.asked
    assert [each.tokens for each in asked if isinstance(each, m.Cover)] == [0, 0, TOKENS]
    assert [each.plan for each in asked if isinstance(each, m.Fetch)] == [7]
    (report,) = [each for each in asked if isinstance(each, m.Observed)]
    assert report == m.Observed([], [(7, 1, 0.0)], prompts=[(TOKENS, 0, {"host": TOKENS})])


def test_an_unknown_outcome_of_a_newer_node_counts_as_gone(fake_node):
    fake_node.fetched = m.Fetched(0, [], {}, "paused", "the node moves")
    session = Session(RemoteSession("unix:///none.sock", FINGERPRINT, "default"))
    assert fetch(session) == (0, 0, {}, Outcome.GONE, "the node moves")


def test_a_fetch_creates_one_plan_on_the_node(node):
    with holdfast.open(node.address, domain="default") as store:
        session = store.session(FINGERPRINT)
        session.save(tokens_for(1), blocks_for(1))
        assert session.cover(tokens_for(1)) == TOKENS
        session.follow(tokens_for(1), "chat")
        assert fetch(session).blocks == BLOCKS
        last = np.zeros_like(blocks_for(2, count=1))
        assert session.fetch(tokens_for(2, count=1), into=last).blocks == 0
        with contextlib.closing(Client(node.address, m.Hello(m.PROTOCOL, "test"), 60.0)) as client:
            (plan,) = client.call(m.Plans(), m.ReportReply, 60.0).data["plans"]
    assert (plan["prompt_tokens"], plan["landed_blocks"]) == (TOKENS, BLOCKS)
    assert plan["not_followed"] is None

    def recorded():
        lines = node.record.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=RecordedRequest).tokens for line in lines]

    wait_until(node.process, lambda: LAYOUT.block_tokens in recorded(), 60)
    assert recorded() == [TOKENS, LAYOUT.block_tokens]


def test_an_interrupted_call_gives_back_what_it_held(node):
    with holdfast.open(node.address, domain="default") as store:
        session = store.session(FINGERPRINT)
        serves(session, 1)

        class Interrupted(BaseException):
            pass

        class Rows(list):
            def __iter__(self):
                raise Interrupted

        backend = session._backend
        with pytest.raises(Interrupted):
            backend.fetch(session.chain(tokens_for(1)), Rows([memoryview(b"")]), 5.0)
        serves(session, 2)
        wait_until(node.process, lambda: store.status().leases == 0, 60)


def test_a_forked_child_gets_gone_with_a_reason_that_names_the_fork(node):
    with holdfast.open(node.address, domain="default") as store:
        session = store.session(FINGERPRINT)
        serves(session, 1)
        pid = os.fork()
        if not pid:
            status = 1
            with contextlib.suppress(BaseException):
                landed = session.fetch(tokens_for(1), into=np.zeros_like(blocks_for(1)))
                store.close()
                status = 0 if landed.outcome is Outcome.GONE and "fork" in landed.reason else 1
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        serves(session, 2)


def test_open_refuses_an_invalid_combination_of_arguments_by_name(tmp_path):
    with pytest.raises(NodeGoneError, match="holdfast serve"):
        holdfast.open(f"unix://{tmp_path}/none.sock", domain="default")
    with pytest.raises(ConfigError, match="target"):
        holdfast.open("tcp://127.0.0.1:1", domain="default")
    with pytest.raises(ConfigError, match="omit host"):
        holdfast.open(f"unix://{tmp_path}/none.sock", host="64 MiB")
    with pytest.raises(ConfigError, match="embedded store"):
        holdfast.open(domain="other")
