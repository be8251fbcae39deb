"""The Valkey tier with real servers: logins, full memory, moved slots, outages."""

import logging
import socket
import ssl
import threading
import time
from binascii import crc_hqx

import pytest

from holdfast.assemble import open_store
from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace, namespace_digest
from holdfast.codec.pack import payload
from holdfast.codec.seal import DataKey
from holdfast.config import parse
from holdfast.errors import ConfigError, Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.payloads import payload_of
from holdfast.tiers.valkey.kind import ValkeyOptions
from holdfast.tiers.valkey.resp import RespLogin
from holdfast.tiers.valkey.slots import SLOTS, slot_of
from holdfast.tiers.valkey.tier import ValkeyTier
from holdfast_bench.harness.certificates import Authority

SECRET = "correct horse"
PAYLOAD = 16 << 10
BLOCK_TOKENS = 16


@pytest.fixture
def password(tmp_path):
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    return str(file)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def eventually(condition, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


# Login and TLS.


def test_a_login_with_a_password_from_a_file_succeeds(serve, opened, password):
    servers = serve(flags=["--requirepass", SECRET], login=RespLogin(password_file=password))
    blocks = ChainedBlocks(4_000)
    assert blocks.save(opened(servers, password_file=password), range(3)) == [Outcome.OK] * 3


def test_a_user_with_few_permissions_can_save_load_and_delete(serve, opened, password):
    servers = serve()
    rule = ["on", f">{SECRET}", "~kv:*", "+get", "+set", "+exists", "+del", "+ping"]
    assert servers.ask(servers.endpoints[0], "ACL", "SETUSER", "hf", *rule) == b"OK"
    tier = opened(servers, user="hf", password_file=password, prefix="kv")
    blocks = ChainedBlocks(4_000)
    assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    assert blocks.load(tier, range(4)) == [Outcome.OK] * 3 + [Outcome.MISS]
    assert tier.held(blocks.namespace, blocks.keys(4), 0) == 3
    tier.delete(blocks.gets([1]))
    assert blocks.load(tier, range(3)) == [Outcome.OK, Outcome.MISS, Outcome.OK]


def test_a_wrong_password_is_gone_and_logged_once(serve, opened, password, tmp_path, caplog):
    servers = serve(flags=["--requirepass", SECRET], login=RespLogin(password_file=password))
    wrong = tmp_path / "wrong"
    wrong.write_text("battery staple")
    wrong.chmod(0o600)
    tier = opened(servers, password_file=str(wrong))
    blocks = ChainedBlocks(4_000)
    for _ in range(5):
        assert blocks.save(tier, range(2)) == [Outcome.GONE] * 2
        assert blocks.load(tier, range(2)) == [Outcome.GONE] * 2
    [line] = warnings(caplog)
    assert "WRONGPASS" in line
    assert SECRET not in caplog.text
    assert "battery" not in caplog.text


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o644, "open to other users; chmod 600 it"), (None, "cannot be read: No such file")],
)
def test_an_unusable_password_file_is_refused_by_name(tmp_path, mode, words):
    file = tmp_path / "password"
    if mode:
        file.write_text(SECRET)
        file.chmod(mode)
    address = "tcp://127.0.0.1:1"
    with pytest.raises(ConfigError, match=f"password_file '{file}' .*{words}"):
        ValkeyTier(ValkeyOptions(address=address, password_file=str(file)))


def test_a_server_that_requires_a_client_certificate_is_used_over_tls(serve, opened, tmp_path):
    authority = Authority(tmp_path)
    files, client = authority.issue("server"), authority.issue("node")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(client.cert, client.key)
    servers = serve(tls=files, login=RespLogin(tls=context))
    blocks = ChainedBlocks(300_000)
    tier = opened(servers, tls_ca=client.ca, tls_cert=client.cert, tls_key=client.key)
    assert blocks.save(tier, range(8)) == [Outcome.OK] * 8
    assert blocks.load(tier, range(9)) == [Outcome.OK] * 8 + [Outcome.MISS]
    anonymous = opened(servers, tls_ca=client.ca)
    assert blocks.load(anonymous, [0]) == [Outcome.GONE]


def test_a_server_with_a_certificate_of_another_authority_is_refused(serve, opened, tmp_path):
    files = Authority(tmp_path).issue("server")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    servers = serve(tls=files, login=RespLogin(tls=context))
    other = Authority(tmp_path, "other").file
    tier = opened(servers, tls_ca=str(other))
    assert ChainedBlocks(4_000).save(tier, [0]) == [Outcome.GONE]


def test_a_file_without_a_certificate_is_refused_by_name(tmp_path):
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"tls_ca: .*ca\.pem' holds no certificates in PEM"):
        ValkeyTier(ValkeyOptions(address="tcp://127.0.0.1:1", tls_ca=str(tmp_path / "ca.pem")))


# Records on the server.


def test_a_server_without_memory_is_full(serve, opened):
    flags = ["--maxmemory", "6mb", "--maxmemory-policy", "noeviction"]
    tier = opened(serve(flags=flags))
    blocks = ChainedBlocks(1 << 20)
    outcomes = blocks.save(tier, range(12))
    count = outcomes.count(Outcome.OK)
    assert 1 <= count < 12
    assert outcomes == [Outcome.OK] * count + [Outcome.FULL] * (12 - count)
    assert blocks.load(tier, range(count)) == [Outcome.OK] * count
    [member] = tier.describe()["members"]
    assert member["state"].startswith("OOM")
    assert member["tiers"][0]["capacity_bytes"] == 6 << 20


def test_records_expire_after_their_time_to_live(serve, opened):
    servers = serve()
    blocks = ChainedBlocks(4_000)
    tier = opened(servers, ttl_s=0.3)
    assert blocks.save(tier, range(2)) == [Outcome.OK] * 2
    eventually(lambda: blocks.load(tier, range(2)) == [Outcome.MISS] * 2)


def test_names_contain_prefix_segment_namespace_and_key(serve, opened):
    servers = serve()
    blocks = ChainedBlocks(4_000)
    blocks.save(opened(servers, prefix="kv"), [0])
    [name] = servers.ask(servers.endpoints[0], "KEYS", "*")
    namespace = namespace_digest(blocks.namespace).hex()
    assert name.decode() == f"kv:{{{blocks.place(0):016x}}}:{namespace}:{blocks.key(0).hex()}"


# A cluster.


def test_a_segment_has_one_slot_and_segments_have_many():
    assert slot_of(b"123456789") == 0x31C3  # from the cluster's specification
    assert len({slot_of(b"%016x" % ChainedBlocks(8).place(0)) for _ in range(50)}) > 40
    assert crc_hqx(b"x", 0) % SLOTS == slot_of(b"x")


def test_a_moved_slot_is_found_on_its_new_server(serve, opened):
    servers = serve(nodes=3)
    tier = opened(servers)
    blocks = ChainedBlocks(4_000)
    assert tier.held(blocks.namespace, blocks.keys(1), 0) == 0  # this requests the slot map
    slot = slot_of(b"%016x" % blocks.place(0))
    names = [servers.ask(at, "CLUSTER", "MYID").decode() for at in servers.endpoints]
    owner = (slot * len(names) + len(names) - 1) // SLOTS
    new = names[(owner + 1) % len(names)]
    for endpoint in servers.endpoints:
        assert servers.ask(endpoint, "CLUSTER", "SETSLOT", str(slot), "NODE", new) == b"OK"
    assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    assert blocks.load(tier, range(3)) == [Outcome.OK] * 3
    assert tier.held(blocks.namespace, blocks.keys(5), 0) == 3


def test_a_killed_server_loses_its_own_segments_only(serve, opened):
    servers = serve(nodes=3, flags=["--cluster-require-full-coverage", "no"])
    tier = opened(servers)
    chains = [ChainedBlocks(4_000) for _ in range(30)]
    for blocks in chains:
        assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    servers.processes[1].kill()
    kept = 0
    for blocks in chains:
        dead = SLOTS // 3 <= slot_of(b"%016x" % blocks.place(0)) < SLOTS * 2 // 3
        expected = Outcome.GONE if dead else Outcome.OK
        assert blocks.load(tier, range(3)) == [expected] * 3
        assert tier.held(blocks.namespace, blocks.keys(3), 0) == (0 if dead else 3)
        kept += not dead
    assert 10 <= kept < 30


def test_a_cluster_without_the_option_is_logged_with_the_remedy(serve, opened, caplog):
    tier = opened(serve(nodes=3), cluster=False)
    outcomes = [outcome for _ in range(10) for outcome in ChainedBlocks(4_000).save(tier, [0])]
    assert set(outcomes) <= {Outcome.OK, Outcome.GONE}
    assert any("set cluster: true" in line for line in warnings(caplog))


# Outages.


def test_an_outage_and_its_end_have_one_log_line_each(serve, opened, caplog):
    caplog.set_level(logging.INFO, logger="holdfast")  # vLLM's connector sets its level
    servers = serve()
    tier = opened(servers)
    blocks = ChainedBlocks(4_000)
    blocks.save(tier, range(2))
    servers.kill()
    for _ in range(20):
        blocks.load(tier, range(2))
    assert [line for line in warnings(caplog) if "is gone" in line] == warnings(caplog)[:1]
    servers.restart()
    eventually(lambda: blocks.save(tier, range(2)) == [Outcome.OK] * 2)
    # The call that finds the server again may be another one, and logs it a moment later.
    eventually(lambda: any("answers again" in each.getMessage() for each in caplog.records))
    assert len(caplog.records) == 2


@pytest.fixture
def http_server():
    """A server that answers in HTTP."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def answer():
        listener.settimeout(0.05)
        while not stop.is_set():
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                continue
            with connected:
                connected.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    stop.set()
    thread.join()
    listener.close()


def test_a_server_of_another_protocol_is_gone(http_server):
    tier = ValkeyTier(ValkeyOptions(address=http_server, deadline_s=60.0, ask_s=60.0))
    blocks = ChainedBlocks(4_000)
    assert blocks.save(tier, range(2)) == [Outcome.GONE] * 2
    assert blocks.load(tier, range(2)) == [Outcome.GONE] * 2
    tier.close()


def test_a_silent_server_is_not_called_after_two_deadlines():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        tier = ValkeyTier(ValkeyOptions(address=address, deadline_s=0.2, ask_s=0.2))
        blocks = ChainedBlocks(4_000)
        outcomes = [blocks.load(tier, [0])[0] for _ in range(40)]
        assert outcomes[:2] == [Outcome.LATE] * 2
        assert outcomes.count(Outcome.GONE) >= 30
        tier.close()


# Several stores on one server.


def configured(servers, tmp_path):
    key = tmp_path / "domain.key"
    if not key.exists():
        key.write_bytes(b"k" * 32)
        key.chmod(0o600)
    tiers = [
        {"kind": "host", "capacity": "16 MiB"},
        {"kind": "valkey", "address": servers.addresses[0], "deadline_s": 60, "ask_s": 60},
    ]
    domains = {"default": {"key_file": str(key)}}
    listen = f"unix://{tmp_path}/node.sock"
    return parse({"listen": listen, "tiers": tiers, "domains": domains})


def test_blocks_saved_by_one_store_are_fetched_by_another_until_an_outage(serve, tmp_path):
    servers = serve()
    config = configured(servers, tmp_path)
    with open_store(config) as one, open_store(config) as other:
        key, domain = one.domain("default")
        namespace = Namespace(b"f" * 16, domain, PAYLOAD, BLOCK_TOKENS)
        chain = Chain(key, namespace.fingerprint, BLOCK_TOKENS)
        chain.extend(range(10 * BLOCK_TOKENS))
        reserved = one.reserve(namespace, chain.keys, chain.parent(0), 0)
        arena = one.arena(domain).view
        for block, place in zip(chain.keys, reserved.places, strict=True):
            payload(arena[place:], PAYLOAD)[:] = payload_of(block, PAYLOAD)
        one.commit(reserved.ticket)
        eventually(lambda: other.look(namespace, chain.keys).blocks == 10)
        fetched = other.fetch(namespace, chain.keys[:6], 60.0)
        arena = other.arena(domain).view
        for block, place in zip(chain.keys, fetched.places, strict=False):
            assert bytes(payload(arena[place:], PAYLOAD)) == bytes(payload_of(block, PAYLOAD))
        assert fetched.sources == {"valkey": 6}
        other.release(fetched.lease)
        servers.kill()
        fetched = other.fetch(namespace, chain.keys, 5.0)
        assert len(fetched.places) == 6
        other.release(fetched.lease)


def sealed(blocks, number, data_key, nonce=b"n" * 12):
    """Return a block to write, sealed with a data key."""
    [put] = blocks.puts([number])
    record = memoryview(bytearray(len(put.record)))
    sealer = data_key.sealer(put.record, nonce)
    assert sealer is not None
    assert sealer.seal(put.record, record) is Outcome.OK
    return put._replace(record=record)


def stored(tier, blocks, number):
    [get] = blocks.gets([number])
    [outcome] = tier.read([get])
    return bytes(get.into) if outcome is Outcome.OK else outcome


def test_a_host_with_another_key_deletes_and_replaces_no_record(serve, opened):
    servers = serve()
    tier, other_tier = opened(servers), opened(servers)
    ours, other = DataKey(b"o" * 32, 1), DataKey(b"x" * 32, 1)
    blocks = ChainedBlocks(4_000)
    put = sealed(blocks, 0, ours)
    assert tier.write([put]) == [Outcome.OK]
    assert other_tier.write([sealed(blocks, 0, other)]) == [Outcome.OK], "it counts as written"
    other_tier.delete_corrupt(blocks.gets([0]))
    assert other_tier.write([sealed(blocks, 0, other)]) == [Outcome.OK]
    assert stored(tier, blocks, 0) == bytes(put.record)


def test_provable_damage_is_deleted_and_other_damage_is_replaced_with_the_same_key(serve, opened):
    servers = serve()
    tier, ours = opened(servers), DataKey(b"o" * 32, 1)
    blocks = ChainedBlocks(4_000)
    [plain] = blocks.puts([0])
    plain.record[200] ^= 1
    damaged = sealed(blocks, 1, ours)
    damaged.record[200] ^= 1
    assert tier.write([plain, damaged, *blocks.puts([2])]) == [Outcome.OK] * 3
    tier.delete_corrupt(blocks.gets([0, 1, 2]))
    assert stored(tier, blocks, 0) is Outcome.MISS
    assert stored(tier, blocks, 1) == bytes(damaged.record)
    assert blocks.load(tier, [2]) == [Outcome.OK]
    better = sealed(blocks, 1, ours, b"m" * 12)
    assert tier.write([better]) == [Outcome.OK]
    assert stored(tier, blocks, 1) == bytes(better.record)


def test_a_value_of_another_length_is_replaced_by_the_next_save(serve, opened):
    servers = serve()
    tier, blocks = opened(servers), ChainedBlocks(4_000)
    assert blocks.save(tier, [0]) == [Outcome.OK]
    [name] = servers.ask(servers.endpoints[0], "KEYS", "*")
    assert servers.ask(servers.endpoints[0], "SET", name.decode(), "short") == b"OK"
    assert blocks.load(tier, [0]) == [Outcome.MISS]
    assert blocks.save(tier, [0]) == [Outcome.OK]
    assert blocks.load(tier, [0]) == [Outcome.OK]
