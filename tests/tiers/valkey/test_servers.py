"""The Valkey tier and what real servers do: ask for passwords, fill up, move slots, vanish."""

import logging
import socket
import ssl
import threading
import time
from binascii import crc_hqx

import pytest

from holdfast.assemble import open_store
from holdfast.blocks.key import Chain
from holdfast.blocks.world import World
from holdfast.codec.pack import payload
from holdfast.config import parse
from holdfast.errors import ConfigError, Outcome
from holdfast.rig.certificates import Authority
from holdfast.testing.chained import Chained
from holdfast.testing.payloads import payload_of
from holdfast.tiers.valkey.slots import SLOTS, slot_of
from holdfast.tiers.valkey.tier import ValkeyOptions, ValkeyTier, ValkeyTls
from holdfast.wire.resp import Login

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


def eventually(what, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.02)


# Who may come in.


def test_a_password_from_a_file_opens_the_door(serve, opened, password):
    servers = serve(flags=["--requirepass", SECRET], login=Login(password_file=password))
    blocks = Chained(4_000)
    assert blocks.save(opened(servers, password_file=password), range(3)) == [Outcome.OK] * 3


def test_a_user_of_its_own_opens_the_door(serve, opened, password):
    servers = serve()
    rule = ["on", f">{SECRET}", "~kv:*", "+get", "+set", "+exists", "+del", "+ping"]
    assert servers.ask(servers.endpoints[0], "ACL", "SETUSER", "hf", *rule) == b"OK"
    tier = opened(servers, user="hf", password_file=password, prefix="kv")
    blocks = Chained(4_000)
    assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    assert blocks.load(tier, range(4)) == [Outcome.OK] * 3 + [Outcome.MISS]
    assert tier.held(blocks.world, blocks.keys(4), 0) == 3
    tier.condemn(blocks.gets([1]))
    assert blocks.load(tier, range(3)) == [Outcome.OK, Outcome.MISS, Outcome.OK]


def test_a_wrong_password_is_gone_and_said_once(serve, opened, password, tmp_path, caplog):
    servers = serve(flags=["--requirepass", SECRET], login=Login(password_file=password))
    wrong = tmp_path / "wrong"
    wrong.write_text("battery staple")
    wrong.chmod(0o600)
    tier = opened(servers, password_file=str(wrong))
    blocks = Chained(4_000)
    for _ in range(5):
        assert blocks.save(tier, range(2)) == [Outcome.GONE] * 2
        assert blocks.load(tier, range(2)) == [Outcome.GONE] * 2
    [line] = warnings(caplog)
    assert "WRONGPASS" in line
    assert SECRET not in caplog.text
    assert "battery" not in caplog.text


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o644, "open to other users; chmod 600 it"), (None, "can not be read: No such file")],
)
def test_a_password_file_that_can_not_be_used_is_refused_by_name(tmp_path, mode, words):
    file = tmp_path / "password"
    if mode:
        file.write_text(SECRET)
        file.chmod(mode)
    address = ("tcp://127.0.0.1:1",)
    with pytest.raises(ConfigError, match=f"password_file '{file}' .*{words}"):
        ValkeyTier(ValkeyOptions(addresses=address, password_file=str(file)))


def test_tls_with_a_certificate_of_ours(serve, opened, tmp_path):
    authority = Authority(tmp_path)
    files, ours = authority.issue("server"), authority.issue("node")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(ours.cert, ours.key)
    servers = serve(tls=files, login=Login(tls=context))
    blocks = Chained(300_000)
    tier = opened(servers, tls=ValkeyTls(ours.ca, ours.cert, ours.key))
    assert blocks.save(tier, range(8)) == [Outcome.OK] * 8
    assert blocks.load(tier, range(9)) == [Outcome.OK] * 8 + [Outcome.MISS]
    nobody = opened(servers, tls=ValkeyTls(ours.ca))
    assert blocks.load(nobody, [0]) == [Outcome.GONE]


def test_a_server_that_a_stranger_vouches_for_is_not_believed(serve, opened, tmp_path):
    files = Authority(tmp_path).issue("server")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    servers = serve(tls=files, login=Login(tls=context))
    stranger = Authority(tmp_path, "stranger").file
    tier = opened(servers, tls=ValkeyTls(str(stranger)))
    assert Chained(4_000).save(tier, [0]) == [Outcome.GONE]


def test_a_certificate_that_is_none_is_refused_by_name(tmp_path):
    (tmp_path / "ca.pem").write_text("nothing")
    tls = ValkeyTls(str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match=r"tls_ca: .*ca\.pem' holds no certificates in PEM"):
        ValkeyTier(ValkeyOptions(addresses=("tcp://127.0.0.1:1",), tls=tls))


# What is kept.


def test_a_server_without_room_says_full(serve, opened):
    flags = ["--maxmemory", "6mb", "--maxmemory-policy", "noeviction"]
    tier = opened(serve(flags=flags))
    blocks = Chained(1 << 20)
    outcomes = blocks.save(tier, range(12))
    stored = outcomes.count(Outcome.OK)
    assert 1 <= stored < 12
    assert outcomes == [Outcome.OK] * stored + [Outcome.FULL] * (12 - stored)
    assert blocks.load(tier, range(stored)) == [Outcome.OK] * stored
    [member] = tier.describe()["members"]
    assert member["state"].startswith("OOM")
    assert member["tiers"][0]["capacity_bytes"] == 6 << 20


def test_records_end_with_their_time_to_live(serve, opened):
    servers = serve()
    blocks = Chained(4_000)
    tier = opened(servers, ttl_s=0.3)
    assert blocks.save(tier, range(2)) == [Outcome.OK] * 2
    eventually(lambda: blocks.load(tier, range(2)) == [Outcome.MISS] * 2)


def test_names_are_for_people_and_carry_the_segment(serve, opened):
    servers = serve()
    blocks = Chained(4_000)
    blocks.save(opened(servers, prefix="kv"), [0])
    [name] = servers.ask(servers.endpoints[0], "KEYS", "*")
    assert name.decode() == f"kv:{{{blocks.place(0):016x}}}:{blocks.key(0).hex()}"


# A cluster.


def test_a_segment_has_one_slot_and_segments_have_many():
    assert slot_of(b"123456789") == 0x31C3  # from the cluster's specification
    assert len({slot_of(b"%016x" % Chained(8).place(0)) for _ in range(50)}) > 40
    assert crc_hqx(b"x", 0) % SLOTS == slot_of(b"x")


def test_a_slot_that_moves_is_found_where_it_went(serve, opened):
    servers = serve(nodes=3)
    tier = opened(servers)
    blocks = Chained(4_000)
    assert tier.held(blocks.world, blocks.keys(1), 0) == 0  # now the map is known
    slot = slot_of(b"%016x" % blocks.place(0))
    names = [servers.ask(at, "CLUSTER", "MYID").decode() for at in servers.endpoints]
    owner = (slot * len(names) + len(names) - 1) // SLOTS
    new = names[(owner + 1) % len(names)]
    for endpoint in servers.endpoints:
        assert servers.ask(endpoint, "CLUSTER", "SETSLOT", str(slot), "NODE", new) == b"OK"
    assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    assert blocks.load(tier, range(3)) == [Outcome.OK] * 3
    assert tier.held(blocks.world, blocks.keys(5), 0) == 3


def test_a_node_that_dies_takes_its_segments_only(serve, opened):
    servers = serve(nodes=3, flags=["--cluster-require-full-coverage", "no"])
    tier = opened(servers, deadline_s=10.0, ask_s=10.0)
    chains = [Chained(4_000) for _ in range(30)]
    for blocks in chains:
        assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
    servers.processes[1].kill()
    kept = 0
    for blocks in chains:
        dead = SLOTS // 3 <= slot_of(b"%016x" % blocks.place(0)) < SLOTS * 2 // 3
        expected = Outcome.GONE if dead else Outcome.OK
        assert blocks.load(tier, range(3)) == [expected] * 3
        assert tier.held(blocks.world, blocks.keys(3), 0) == (0 if dead else 3)
        kept += not dead
    assert 10 <= kept < 30


def test_a_cluster_that_nobody_mentioned_is_said(serve, opened, caplog):
    tier = opened(serve(nodes=3), cluster=False)
    outcomes = [outcome for _ in range(10) for outcome in Chained(4_000).save(tier, [0])]
    assert set(outcomes) <= {Outcome.OK, Outcome.GONE}
    assert any("set cluster: true" in line for line in warnings(caplog))


# Trouble.


def test_a_line_in_the_log_when_it_goes_and_when_it_comes(serve, opened, caplog):
    caplog.set_level(logging.INFO)
    servers = serve()
    tier = opened(servers)
    blocks = Chained(4_000)
    blocks.save(tier, range(2))
    servers.kill()
    for _ in range(20):
        blocks.load(tier, range(2))
    assert [line for line in warnings(caplog) if "is gone" in line] == warnings(caplog)[:1]
    servers.restart()
    eventually(lambda: blocks.save(tier, range(2)) == [Outcome.OK] * 2)
    assert [r.getMessage() for r in caplog.records if "answers again" in r.getMessage()]
    assert len(caplog.records) == 2


@pytest.fixture
def impostor():
    """Something that listens and is no such server."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def talk():
        listener.settimeout(0.05)
        while not stop.is_set():
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                continue
            with connected:
                connected.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=talk)
    thread.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    stop.set()
    thread.join()
    listener.close()


def test_something_else_that_listens_is_gone(impostor):
    tier = ValkeyTier(ValkeyOptions(addresses=(impostor,)))
    blocks = Chained(4_000)
    assert blocks.save(tier, range(2)) == [Outcome.GONE] * 2
    assert blocks.load(tier, range(2)) == [Outcome.GONE] * 2
    tier.close()


def test_what_swallows_everything_costs_little_after_two_deadlines(standstills):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        tier = ValkeyTier(ValkeyOptions(addresses=(address,), deadline_s=0.2, ask_s=0.2))
        blocks = Chained(4_000)
        begun_s = time.monotonic()
        outcomes = [blocks.load(tier, [0])[0] for _ in range(40)]
        assert outcomes[:2] == [Outcome.LATE] * 2
        assert outcomes.count(Outcome.GONE) >= 30
        assert standstills.since(begun_s) < 3.0
        tier.close()


# Stores over one server.


def configured(servers, tmp_path):
    key = tmp_path / "domain.key"
    if not key.exists():
        key.write_bytes(b"k" * 32)
        key.chmod(0o600)
    tiers = [
        {"kind": "host", "capacity": "16 MiB"},
        {"kind": "valkey", "address": servers.addresses[0]},
    ]
    domains = {"default": {"key_file": str(key)}}
    listen = f"unix://{tmp_path}/node.sock"
    return parse({"listen": listen, "tiers": tiers, "domains": domains})


def test_what_one_store_saved_another_fetches_until_the_server_is_gone(serve, tmp_path):
    servers = serve()
    config = configured(servers, tmp_path)
    with open_store(config) as one, open_store(config) as other:
        key, domain = one.domain("default")
        world = World(b"f" * 16, domain, PAYLOAD, BLOCK_TOKENS)
        chain = Chain(key, world.fingerprint, BLOCK_TOKENS)
        chain.extend(range(10 * BLOCK_TOKENS))
        reserved = one.reserve(world, chain.keys, chain.parent(0), 0)
        arena = one.arena(domain).view
        for block, place in zip(chain.keys, reserved.places, strict=True):
            payload(arena[place:], PAYLOAD)[:] = payload_of(block, PAYLOAD)
        one.commit(reserved.ticket)
        eventually(lambda: other.look(world, chain.keys).blocks == 10)
        fetched = other.fetch(world, chain.keys[:6], 5.0)
        arena = other.arena(domain).view
        for block, place in zip(chain.keys, fetched.places, strict=False):
            assert bytes(payload(arena[place:], PAYLOAD)) == bytes(payload_of(block, PAYLOAD))
        assert fetched.sources == {"valkey": 6}
        other.release(fetched.lease)
        servers.kill()
        fetched = other.fetch(world, chain.keys, 5.0)
        assert len(fetched.places) == 6
        other.release(fetched.lease)
