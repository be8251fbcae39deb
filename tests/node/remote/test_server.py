"""The target: records of any domain in and out, and nobody who behaves badly gets far."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from holdfast.address import tcp_endpoint
from holdfast.blocks.envelope import HEADER_BYTES, read_header, stamp
from holdfast.buffers import aligned_buffer
from holdfast.clock import ManualClock
from holdfast.codec.codec import codec_named
from holdfast.codec.coded import encode_record
from holdfast.codec.pack import pack, payload
from holdfast.codec.seal import DataKey
from holdfast.errors import BusyError, ConfigError, Outcome
from holdfast.limits import MIB
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import NodeAddresses, TargetLimits, TargetService
from holdfast.status import DomainTraffic
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import is_right, key_of, namespace_of, record_of
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView
from holdfast.tiers.base import LocalTier
from holdfast.wire.frame import encode
from holdfast.wire.remote import client as target_module
from holdfast.wire.remote import messages as m
from holdfast.wire.remote.batches import SPLIT_BYTES
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.stream import PlainStream

NAMESPACE = namespace_of(30_000)
KEYS = [key_of(i) for i in range(40)]
RECORDS = [record_of(NAMESPACE, key) for key in KEYS]
HASTY = TargetLimits(handshake_s=5.0, idle_s=30, body_s=5.0, pace_s=5.0, pace_bytes=4096)
"""Short limits that a process which stands still for 2 s still meets."""


@pytest.fixture
def served(serve_here):
    """Call to serve a target in this process."""

    def start(limits=None, tier: LocalTier | None = None, host_bytes=16 * MIB):
        return serve_here(NAMESPACE, limits, [tier] if tier else [], host_bytes)

    return start


@pytest.fixture
def node(served):
    return served()


@pytest.fixture
def hasty(served):
    """A target whose patience is short."""
    return served(HASTY)


def test_blocks_of_an_unknown_domain_are_stored_and_returned_unchanged(node):
    assert node.target.put(RECORDS, 60) == [Outcome.OK] * 40
    assert node.get(KEYS) == 40
    assert node.get([KEYS[3], KEYS[1]]) == 2
    assert node.target.exist(NAMESPACE, [key_of(99), *KEYS[:2]], 60).held == b"\0\1\1"
    assert node.store.listing()[0]["blocks"] == 40


def test_a_large_batch_uses_one_connection_if_no_thread_can_start(served, monkeypatch):
    """Work left in a queue would be done later, into buffers that are somebody else's by then."""

    def no_more(*_):
        raise ConfigError("holdfast-target: 16 threads are more than this process may start")

    large = namespace_of(SPLIT_BYTES // 4)
    keys = [key_of(200 + i) for i in range(5)]
    node = served(host_bytes=64 * MIB)
    monkeypatch.setattr(target_module, "workers", no_more)
    with contextlib.closing(TargetClient(node.address, batch_parts=2)) as node.target:
        records = [record_of(large, key) for key in keys]
        assert node.target.put(records, 60) == [Outcome.OK] * 5
        assert node.get(keys, large) == 5


def test_a_get_stops_at_the_first_block_that_is_not_held(node):
    node.target.put(RECORDS[:3] + RECORDS[4:6], 60)
    assert node.get(KEYS[:6]) == 3
    assert node.target.get(NAMESPACE, [key_of(99)], [aligned_buffer(32768)], 60).outcome == "miss"


def test_a_get_over_two_connections_stops_at_the_first_missing_block(served):
    large = namespace_of(SPLIT_BYTES // 8)
    keys = [key_of(300 + i) for i in range(10)]
    node = served(host_bytes=64 * MIB)
    with contextlib.closing(TargetClient(node.address, batch_parts=2)) as node.target:
        node.target.put([record_of(large, key) for key in keys if key != keys[2]], 60)
        into = [aligned_buffer(large.slot_bytes) for _ in keys]
        assert node.target.get(large, keys, into, 60).blocks == 2
        assert [is_right(into[i], large, keys[i]) for i in range(2)] == [True, True]


def test_another_namespace_is_not_served(node):
    node.target.put(RECORDS[:2], 60)
    for other in (
        NAMESPACE._replace(domain=b"d" * 16),
        NAMESPACE._replace(fingerprint=b"f" * 16),
        NAMESPACE._replace(raw_bytes=30_001),
        NAMESPACE._replace(block_tokens=64),
    ):
        assert node.target.exist(other, KEYS[:2], 60).held == b"\0\0"
        assert node.get(KEYS[:2], other) == 0
    other = NAMESPACE._replace(domain=b"d" * 16)
    assert node.target.put([record_of(other, KEYS[0])], 60) == [Outcome.OK]
    assert node.get(KEYS[:2]) == 2
    assert node.get(KEYS[:1], other) == 1
    assert node.target.delete(other, KEYS[:2], 60).blocks == 1
    assert node.get(KEYS[:2]) == 2


def test_a_damaged_payload_is_kept_until_its_reader_reports_it(node):
    records = [memoryview(bytearray(record)) for record in RECORDS[:3]]
    records[1][HEADER_BYTES + 20_000] ^= 1
    assert node.target.put(records, 60) == [Outcome.OK] * 3
    into = [aligned_buffer(NAMESPACE.slot_bytes) for _ in records]
    assert node.target.get(NAMESPACE, KEYS[:3], into, 60).blocks == 3
    assert [is_right(r, NAMESPACE, k) for r, k in zip(into, KEYS, strict=False)] == [
        True,
        False,
        True,
    ]
    assert node.target.suspect(NAMESPACE, KEYS[:3], 60) == (1, Outcome.OK), "only that one"
    assert node.target.put(RECORDS[:3], 60) == [Outcome.OK] * 3
    assert node.get(KEYS[:3]) == 3


def sealed(data_key, keys, nonce=b"n" * 12):
    """Return records of the test blocks, sealed with a data key."""
    twins = []
    for key in keys:
        record = memoryview(bytearray(record_of(NAMESPACE, key)))
        twins.append(memoryview(bytearray(len(record))))
        sealer = data_key.sealer(record, nonce)
        assert sealer is not None
        assert sealer.seal(record, twins[-1]) is Outcome.OK
    return twins


def test_a_reported_sealed_record_is_replaced_only_by_its_own_key_or_a_later_epoch(
    node,
):
    right, later, other = DataKey(b"r" * 32, 1), DataKey(b"l" * 32, 2), DataKey(b"o" * 32, 1)
    records = sealed(right, KEYS[:3])
    records[1][HEADER_BYTES + 20_000] ^= 1
    assert node.target.put(records, 60) == [Outcome.OK] * 3
    stored = lambda: [bytes(record) for record in got(node, 3)]  # noqa: E731
    assert node.target.put(sealed(right, KEYS[:3], b"m" * 12), 60) == [Outcome.OK] * 3
    assert stored() == [bytes(r) for r in records], "nothing is replaced that nobody reported"
    assert node.target.suspect(NAMESPACE, KEYS[1:3], 60) == (0, Outcome.OK), "it cannot tell"
    assert node.target.put(sealed(other, KEYS[:3]), 60) == [Outcome.OK] * 3
    assert stored() == [bytes(r) for r in records], "another key replaces nothing"
    better = sealed(right, KEYS[1:2], b"m" * 12) + sealed(later, KEYS[2:3])
    assert node.target.put(better, 60) == [Outcome.OK] * 2
    assert stored() == [bytes(r) for r in [records[0], *better]]
    assert node.store.listing()[0]["blocks"] == 3
    assert node.target.put(sealed(right, KEYS[1:2], b"o" * 12), 60) == [Outcome.OK]
    assert stored()[1] == bytes(better[0]), "it is doubted no more"


def got(node, count):
    into = [aligned_buffer(NAMESPACE.slot_bytes) for _ in range(count)]
    assert node.target.get(NAMESPACE, KEYS[:count], into, 60).blocks == count
    return into


def test_a_reported_copy_on_a_targets_disk_is_checked_too(served):
    node = served(tier=MemoryTier(16 * MIB), host_bytes=4 * MIB)
    assert node.target.put(RECORDS[:3], 60) == [Outcome.OK] * 3
    store = node.store
    node.until(lambda: store.status().waiting_to_write == 0)
    view = StoreView(store)
    place, tier = view.place(NAMESPACE, KEYS[1], 1), view.tier(1)
    record = tier._records[place]
    tier._records[place] = record[:20_000] + bytes([record[20_000] ^ 1]) + record[20_001:]
    assert node.target.suspect(NAMESPACE, KEYS[:3], 60) == (1, Outcome.OK)
    assert view.place(NAMESPACE, KEYS[1], 1) < 0
    assert node.get(KEYS[:3]) == 3, "the copy in memory is whole"


def test_a_record_that_differs_from_its_announced_header_is_not_stored(node):
    with node.connect() as raw:
        headers = bytes(RECORDS[0][:HEADER_BYTES])
        frame = encode(2, m.PutRecords(headers), len(RECORDS[1]))
        raw.sendall(frame + bytes(RECORDS[1]))
        assert bytes(encode(2, m.Stored(b"\0"))) == raw.recv(4096)
    assert node.service.counters.corrupt == 1
    assert node.target.exist(NAMESPACE, KEYS[:2], 60).held == b"\0\0"


def test_a_record_with_a_generation_stamped_by_a_tier_is_accepted(node):
    record = memoryview(bytearray(RECORDS[0]))
    stamp(record, 12345)
    assert node.target.put([record], 60) == [Outcome.OK]
    assert node.get(KEYS[:1]) == 1


def test_deleted_blocks_are_gone_and_can_be_put_again(node):
    node.target.put(RECORDS[:4], 60)
    assert node.target.delete(NAMESPACE, [*KEYS[1:3], key_of(99)], 5) == (2, Outcome.OK)
    assert node.target.exist(NAMESPACE, KEYS[:4], 60).held == b"\1\0\0\1"
    assert node.target.put(RECORDS[:4], 60) == [Outcome.OK] * 4
    assert node.get(KEYS[:4]) == 4


def test_a_repeated_put_of_a_held_block_takes_no_second_slot(node):
    node.target.put(RECORDS[:4], 60)
    used = StoreView(node.store).used_bytes(0)
    assert node.target.put(RECORDS[:4], 60) == [Outcome.OK] * 4
    assert StoreView(node.store).used_bytes(0) == used


def test_a_batch_that_does_not_fit_leaves_the_connection_usable(served):
    node = served(host_bytes=MIB)
    namespace = namespace_of(100_000)
    records = [record_of(namespace, key) for key in KEYS[:20]]
    outcomes = node.target.put(records, 60)
    assert set(outcomes) == {Outcome.OK, Outcome.FULL} or set(outcomes) == {Outcome.FULL}
    assert node.get(KEYS[:1], namespace) == (outcomes[0] == "ok")
    assert node.service.counters.protocol_errors == 0


def test_a_put_that_the_receive_budget_turns_away_counts_as_full(node, monkeypatch):
    monkeypatch.setattr(node.service, "receiving", lambda *_: contextlib.nullcontext(False))
    assert node.target.put(RECORDS[:2], 60) == [Outcome.FULL] * 2
    assert node.store.status().activity.calls["receive"] == {"full": 1}


def test_an_encoded_record_counts_as_its_slot_while_it_is_received(node, monkeypatch):
    record, into = record_of(NAMESPACE, KEYS[0]), aligned_buffer(NAMESPACE.slot_bytes)
    payload(record, NAMESPACE.raw_bytes)[:] = bytes(NAMESPACE.raw_bytes)
    pack(record, read_header(record)[0])
    stored = encode_record(record, codec_named("planes"), into, 2)
    assert 0 < stored < NAMESPACE.slot_bytes
    receiving, counted = node.service.receiving, []

    def noting(nbytes, domain):
        counted.append(nbytes)
        return receiving(nbytes, domain)

    monkeypatch.setattr(node.service, "receiving", noting)
    assert node.target.put([into[:stored]], 60) == [Outcome.OK]
    assert counted == [NAMESPACE.slot_bytes]
    assert node.service.counters.received_bytes == stored


def test_a_record_larger_than_the_memory_is_refused_and_evicts_nothing(served):
    node = served(host_bytes=MIB)
    node.target.put(RECORDS[:4], 60)
    assert node.target.put([record_of(namespace_of(2 * MIB), KEYS[9])], 60) == [Outcome.FULL]
    assert node.get(KEYS[:4]) == 4


def test_an_unknown_domain_is_refused_by_name_and_the_next_request_is_served(node, caplog):
    table = node.store.table
    table.foreign, foreign = None, table.foreign
    assert node.target.put(RECORDS[:4], 60) == [Outcome.GONE] * 4
    assert f"domain {NAMESPACE.domain.hex()}: there is no key of it here" in node.target.refusal
    assert "name the domain and its key under `domains`" in node.target.refusal
    assert "request failed" not in caplog.text
    table.foreign = foreign
    assert node.target.put(RECORDS[:4], 60) == [Outcome.OK] * 4
    assert node.get(KEYS[:4]) == 4


def test_a_get_that_outlasts_its_lease_keeps_its_slots_until_it_is_sent(served):
    node = served(TargetLimits(), host_bytes=MIB)
    node.store.clock, pace = ManualClock(), node.service.pace
    node.target.put(RECORDS[:6], 60)

    def crawl():
        node.service.pace = pace
        node.store.clock.advance(60)
        node.store.housekeep()
        for record in RECORDS[6:]:
            node.target.put([record], 60)
        return pace()

    node.service.pace = crawl
    assert (node.get(KEYS[:6]), node.service.pace) == (6, pace)
    node.until(lambda: not StoreView(node.store).leases)


def test_a_target_reports_its_status(node):
    node.target.put(RECORDS[:2], 60)
    assert node.get(KEYS[:1]) == 1
    status, outcome = node.target.stats(60)
    size, target = NAMESPACE.slot_bytes, status.target
    assert outcome is Outcome.OK
    assert (status.blocks, status.host) == (2, socket.gethostname())
    assert (target.received_blocks, target.received_bytes) == (2, 2 * size)
    assert (target.sent_blocks, target.sent_bytes) == (1, size)
    assert target.domains == [DomainTraffic(NAMESPACE.domain.hex(), False, 2 * size, size)]
    assert status.incarnation == node.store.incarnation


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        bytes(encode(3, m.ExistBlocks(**NAMESPACE._asdict(), keys=KEYS[0]))),
        bytes(encode(1, m.ExistBlocks(**NAMESPACE._asdict(), keys=KEYS[0]))),
        bytes(encode(2, m.ExistBlocks(**NAMESPACE._asdict(), keys=KEYS[0]))) * 2,
        bytes(encode(2, m.PutRecords(bytes(128)), 4096)) + bytes(4096),
        bytes(encode(2, m.PutRecords(b"x"), 4096)) + bytes(4096),
        bytes(encode(2, m.PutRecords(bytes(RECORDS[0][:128])), 1 << 40)),
        bytes(encode(2, m.PutRecords(bytes(RECORDS[0][:128])), 4096)) + bytes(4096),
        bytes(encode(2, m.PutRecords(bytes(RECORDS[0][:128]) * 9000), 9000 * 32768)),
        bytes(encode(2, m.ExistBlocks(**NAMESPACE._asdict(), keys=KEYS[0]), 10)) + bytes(10),
        bytes(encode(2, m.Stored(b""))),
        bytes(encode(2, m.ExistBlocks(**NAMESPACE._asdict(), keys=KEYS[0])))[:30],
    ],
    ids=[
        "http", "ones", "a request left out", "hello's number again", "a request replayed",
        "no header", "part of a header", "huge payload", "short payload", "oversize batch",
        "payload to a question", "a reply", "half a message",
    ],
)  # fmt: skip
def test_garbage_closes_only_its_own_connection(hasty, data, ended):
    node = hasty
    node.target.put(RECORDS[:2], 60)
    with node.connect() as raw:
        with contextlib.suppress(ConnectionError):  # it may end the connection while we send
            raw.sendall(data)
        assert ended(raw)
    node.until(lambda: node.service.counters.protocol_errors == 1)
    assert node.get(KEYS[:2]) == 2


@pytest.mark.parametrize(
    "request_",
    [
        m.ExistBlocks(**{**NAMESPACE._asdict(), "fingerprint": b"f"}, keys=KEYS[0]),
        m.ExistBlocks(**{**NAMESPACE._asdict(), "raw_bytes": 1 << 40}, keys=KEYS[0]),
        m.ExistBlocks(**{**NAMESPACE._asdict(), "raw_bytes": 0}, keys=KEYS[0]),
        m.ExistBlocks(**{**NAMESPACE._asdict(), "block_tokens": 1 << 40}, keys=KEYS[0]),
        m.ExistBlocks(**{**NAMESPACE._asdict(), "block_tokens": 0}, keys=KEYS[0]),
        m.ExistBlocks(**NAMESPACE._asdict(), keys=KEYS[0][:15]),
        m.ExistBlocks(**NAMESPACE._asdict(), keys=bytes(16 * 65_537)),
        m.GetRecords(**NAMESPACE._asdict(), keys=KEYS[0], deadline_s=float("nan")),
        m.GetRecords(**NAMESPACE._asdict(), keys=KEYS[0], deadline_s=1e9),
        m.Join(1, "again", b""),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused_and_the_next_one_is_served(node, request_):
    with node.connect() as raw:
        raw.sendall(encode(2, request_))
        assert b"refused" in raw.recv(4096)
        raw.sendall(encode(3, m.ExistBlocks(**NAMESPACE._asdict(), keys=KEYS[0])))
        assert bytes(encode(3, m.Existing(b"\0"))) == raw.recv(4096)


def test_a_peer_that_disconnects_while_it_joins_is_removed_from_nixl(node, monkeypatch, ended):
    added, removed, send = [], [], PlainStream.send

    def add_peer(metadata):
        added.append(metadata)
        return "peer"

    def send_all_but_joined(stream, parts, limit):
        if b"joined" in parts[0]:
            raise ConnectionResetError("the peer has gone")
        send(stream, parts, limit)

    agent = SimpleNamespace(add_peer=add_peer, remove_peer=removed.append)
    monkeypatch.setattr(node.service, "agent", agent)
    monkeypatch.setattr(PlainStream, "send", send_all_but_joined)
    with socket.create_connection(tcp_endpoint(node.address), 60) as raw:
        raw.recv(4096)
        raw.sendall(encode(1, m.Join(m.TARGET_PROTOCOL, "raw", b"n" * 32, nixl=b"metadata")))
        assert ended(raw)
    node.until(lambda: node.service.counters.protocol_errors == 1)
    assert (added, removed) == ([b"metadata"], ["peer"])


def test_an_idle_connection_is_closed_without_a_warning(served, caplog, ended):
    node = served(TargetLimits(idle_s=0.1))
    with node.connect() as raw:
        assert ended(raw)
    node.until(lambda: node.service.counters.connections == 0)
    assert node.service.counters.protocol_errors == 0
    assert "connection ended" not in caplog.text


def test_a_peer_that_sends_nothing_is_disconnected(hasty, ended):
    node = hasty
    silent = [socket.create_connection(tcp_endpoint(node.address)) for _ in range(20)]
    assert node.target.put(RECORDS[:1], 60) == [Outcome.OK]
    assert all(ended(raw) for raw in silent)
    node.until(lambda: node.service.counters.connections == 1)
    for raw in silent:
        raw.close()


def test_a_peer_that_sends_a_payload_slowly_is_disconnected_and_its_slot_freed(hasty):
    node = hasty
    with node.connect() as raw:
        raw.sendall(encode(2, m.PutRecords(bytes(RECORDS[0][:128])), len(RECORDS[0])))
        node.until(lambda: StoreView(node.store).used_bytes(0))

        def dribble():
            for byte in bytes(RECORDS[0]):
                raw.send(bytes([byte]))
                time.sleep(0.01)

        with pytest.raises(ConnectionError):
            dribble()
    node.until(lambda: StoreView(node.store).used_bytes(0) == 0)


def test_a_peer_that_reads_no_reply_is_disconnected_and_its_lease_ends(served):
    node = served(HASTY, host_bytes=64 * MIB)
    namespace = namespace_of(4 * MIB)
    node.target.put([record_of(namespace, key) for key in KEYS[:8]], 60)
    before = node.service.status().connections
    with node.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        keys = b"".join(KEYS[:8])
        raw.sendall(encode(2, m.GetRecords(**namespace._asdict(), keys=keys, deadline_s=5)))
        node.until(lambda: node.service.status().connections <= before)
        node.until(lambda: not node.store.status().leases)


def test_connections_have_a_limit_and_a_peer_beyond_it_learns_that_the_target_is_busy(
    served, caplog
):
    node = served(TargetLimits(connections=3))
    raws = [node.connect() for _ in range(3)]
    assert node.target.exist(NAMESPACE, KEYS[:1], 60).outcome is Outcome.UNSENT
    assert node.target.is_turned_away
    assert node.target.trouble.startswith("busy: the target serves 3 connections, as many as it")
    assert node.service.counters.turned_away == 1
    assert "connection turned away peer=127.0.0.1" in caplog.text
    for raw in raws:
        raw.close()
    node.until(lambda: node.target.exist(NAMESPACE, KEYS[:1], 60).outcome is Outcome.OK)
    assert not node.target.is_turned_away
    assert node.target.trouble == ""


def test_calls_of_a_client_at_the_limit_share_the_connection_that_it_has(served):
    node = served(TargetLimits(connections=1))
    assert node.target.put(RECORDS, 60) == [Outcome.OK] * 40
    outcomes = []

    def ask(first):
        outcomes.extend(node.target.exist(NAMESPACE, KEYS[first:], 60).outcome for _ in range(20))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [Outcome.OK] * 160
    assert node.service.counters.connections == 1


def test_connections_of_all_listeners_are_counted(node):
    listener = bind("tcp://127.0.0.1:0")
    other = TargetServer(listener, node.service, EntryRules())
    other.start()
    with contextlib.closing(other), node.connect():
        elsewhere = TargetClient(address_of(listener))
        with contextlib.closing(elsewhere):
            assert elsewhere.put(RECORDS[:1], 60) == [Outcome.OK]
            assert node.service.status().connections == 2
        node.until(lambda: node.service.status().connections == 1)


def test_a_mistake_of_the_target_ends_one_connection_and_is_logged(node, caplog):
    def fails():
        raise KeyError("a mistake")

    listener = bind("tcp://127.0.0.1:0")
    other = TargetServer(listener, node.service, EntryRules(token_keys=fails))
    other.start()
    with contextlib.closing(other), contextlib.closing(TargetClient(address_of(listener))) as one:
        assert one.put(RECORDS[:1], 60) == [Outcome.GONE]
        node.until(lambda: node.service.counters.protocol_errors == 1)
    assert "connection failed peer=127.0.0.1" in caplog.text
    assert "KeyError: 'a mistake'" in caplog.text
    assert node.target.put(RECORDS[:1], 60) == [Outcome.OK]


def test_closing_the_server_disconnects_every_peer(node, ended):
    raw = node.connect()
    node.close()
    assert ended(raw)
    raw.close()
    assert node.target.exist(NAMESPACE, KEYS, 60).outcome is Outcome.GONE


def test_binding_an_address_in_use_or_of_another_machine_is_an_error():
    with bind("tcp://127.0.0.1:0") as listener:
        listener.listen()
        with pytest.raises(BusyError, match=r"listen: 'tcp://127.0.0.1:\d+': Address already"):
            bind(address_of(listener))
    with pytest.raises(ConfigError, match=r"listen: 'tcp://192.0.2.1:1': Cannot assign"):
        bind("tcp://192.0.2.1:1")


def test_a_thousand_gets_of_one_segment_read_each_block_once(served, monkeypatch):
    monkeypatch.setattr(
        "holdfast.store.store.unmeasured_tiers", lambda _: []
    )  # who reads ahead of plans

    class Counting(MemoryTier):
        def read(self, batch):
            reads.extend(get.key for get in batch)
            time.sleep(0.05)
            return super().read(batch)

    reads = []
    node = served(TargetLimits(), Counting(64 * MIB))
    node.target.put(RECORDS, 60)
    node.until(lambda: node.store.status().waiting_to_write == 0)
    leave_all(node.store)
    blocks = []

    def ask():
        blocks.extend([node.get(KEYS) for _ in range(50)])

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert blocks == [40] * 1000
    assert sorted(reads) == sorted(KEYS)


def test_a_target_reports_the_url_of_its_status_page():
    with Store(16 << 20, [], {"default": b"s" * 32}, StoreOptions(serves_peers=True)) as store:
        listener = bind("tcp://127.0.0.1:0")
        addresses = NodeAddresses("", [address_of(listener)], "tcp://0.0.0.0:9464")
        service = TargetService(store, addresses=addresses)
        server = TargetServer(listener, service, EntryRules())
        server.start()
        with (
            contextlib.closing(server),
            contextlib.closing(TargetClient(address_of(listener))) as one,
        ):
            status, outcome = one.stats(60)
            assert outcome is Outcome.OK
            assert (status.role, status.addresses) == ("target", [one.address])
            assert one.page == "http://127.0.0.1:9464/"


def test_traffic_counters_of_invented_domains_are_bounded(node):
    for number in range(2_000):
        node.service.count_received(number.to_bytes(16), 1, 10 + number % 2)
    told = node.service.status()
    assert (told.received_blocks, len(told.domains)) == (2_000, 64)
    assert told.domains[0].domain == "others"
