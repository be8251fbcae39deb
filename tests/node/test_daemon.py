"""A real node in its own process, over its real socket: serves, refuses, ends, comes back."""

import contextlib
import datetime as dt
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError, NodeGoneError, Outcome, RefusedError
from holdfast.limits import RESERVATIONS_MAX, RESERVE_BLOCKS_MAX, RESERVED_BLOCKS_MAX
from holdfast.node.daemon import check_expiry, http_token
from holdfast.node.validation import MAX_INLINE_BLOCKS
from holdfast.probe import free_port
from holdfast.testing.payloads import namespace_of
from holdfast.wire.frame import encode
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.local.reconnecting_client import ReconnectingClient
from holdfast.wire.remote import token
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.harness.certificates import Authority
from holdfast_bench.harness.pause import pause, resume


def serve(config, **options):
    """Start a node that is expected to refuse; return its exit code and words."""
    argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(config)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, **options)
    return done.returncode, done.stderr


def test_a_context_saved_by_one_engine_is_read_by_another(start_node, engine, names):
    node = start_node()
    one, two = engine(node.address), engine(node.address)
    keys = names("shared", 20)
    assert one.cover(keys) == 0
    assert one.read(keys) == (0, {})
    assert one.save(keys) == 20
    assert two.cover(keys) == 20
    assert two.read(keys) == (20, {"host": 20})
    assert two.save(keys) == 0


def test_the_lookup_of_a_long_chain_runs_in_a_thread(start_node, engine, names):
    one = engine(start_node().address)
    keys = names("long", MAX_INLINE_BLOCKS + 1)
    assert one.save(keys[:20]) == 20
    assert one.cover(keys[:-1]) == one.cover(keys) == 20


def test_two_engines_that_save_concurrently_both_keep_their_blocks(start_node, engine, names):
    node = start_node()
    engines = [engine(node.address) for _ in range(2)]
    chains = [[names(f"{i}/{j}", 8) for j in range(10)] for i in range(2)]
    open_ = [
        (one, chain, one.client.send(m.Reserve(b"".join(chain), one.fingerprint, 0)))
        for one, own in zip(engines, chains, strict=True)
        for chain in own
    ]
    for one, chain, request in open_:
        reserved = one.client.wait(request, 60)
        one.fill(chain, reserved)
        assert one.call(m.Commit(reserved.ticket)).blocks == 8
    for one in engines:
        assert [one.read(chain)[0] for own in chains for chain in own] == [8] * 20


def test_namespaces_do_not_share_blocks(start_node, engine, names, tmp_path):
    key_file = tmp_path / "other.key"
    key_file.write_bytes(os.urandom(32))
    key_file.chmod(0o600)
    node = start_node(domains={"other": {"key_file": str(key_file)}})
    keys = names("shared", 4)
    assert engine(node.address).save(keys) == 4
    assert engine(node.address, fingerprint=b"another-world-16").cover(keys) == 0
    foreign = engine(node.address, domain="other")
    assert foreign.cover(keys) == 0
    assert foreign.client.welcome.domain_key == key_file.read_bytes()


def test_leases_and_tickets_belong_to_their_session(start_node, engine, names):
    node = start_node()
    owner, thief = engine(node.address), engine(node.address)
    keys = names("owned", 4)
    reserved = owner.reserve(keys)
    owner.fill(keys, reserved)
    assert thief.call(m.Commit(reserved.ticket)).blocks == 0
    assert thief.call(m.Abort(reserved.ticket)) == m.Done()
    assert owner.call(m.Commit(reserved.ticket)).blocks == 4
    fetched = owner.call(m.Fetch(b"".join(keys), 5.0))
    assert not thief.call(m.Release(fetched.lease)).valid
    assert owner.call(m.Release(fetched.lease)).valid
    assert not owner.call(m.Release(fetched.lease)).valid


def test_a_session_has_a_limit_of_tickets_and_reserved_blocks(start_node, engine, names):
    one = engine(start_node().address)
    keys = names("many", RESERVE_BLOCKS_MAX)
    tickets = [one.reserve(keys).ticket for _ in range(RESERVED_BLOCKS_MAX // RESERVE_BLOCKS_MAX)]
    told = rf"^reserve: 4 open reservations with {RESERVED_BLOCKS_MAX + 1} blocks,"
    with pytest.raises(RefusedError, match=told):
        one.reserve(keys[:1])
    for ticket in tickets:
        one.call(m.Abort(ticket))
    for _ in range(RESERVATIONS_MAX):
        one.reserve([])
    with pytest.raises(
        RefusedError, match=rf"^reserve: {RESERVATIONS_MAX} open reservations with 0 blocks"
    ):
        one.reserve([])


def test_an_engine_that_leaves_gives_back_leases_and_tickets(start_node, engine, names):
    node = start_node()
    watcher, leaver = engine(node.address), engine(node.address)
    keys = names("held", 4)
    leaver.save(keys)
    leaver.call(m.Fetch(b"".join(keys), 5.0))
    leaver.reserve(names("half", 4))
    watcher.until(lambda s: (s["leases"], s["tickets"]) == (1, 1))
    leaver.close()
    watcher.until(lambda s: (s["leases"], s["tickets"]) == (0, 0))
    assert watcher.cover(names("half", 4)) == 0


SAVER = """
import sys, time
sys.path.insert(0, sys.argv[3])
from conftest import Engine, keys_of
engine = Engine(sys.argv[1])
keys = keys_of(sys.argv[2], 8)
reserved = engine.reserve(keys)
engine.fill(keys[:5], reserved)
print("half", flush=True)
time.sleep(600)
"""


def test_the_slots_of_an_engine_killed_during_a_save_are_freed(start_node, engine, names):
    node = start_node()
    watcher = engine(node.address)
    before = watcher.status()["tiers"][0]["used_bytes"]
    argv = [sys.executable, "-c", SAVER, node.address, "killed", str(Path(__file__).parent)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as saver:
        assert saver.stdout.readline() == b"half\n"
        watcher.until(lambda s: s["tickets"] == 1)
        assert watcher.status()["tiers"][0]["used_bytes"] > before
        saver.kill()
    watcher.until(lambda s: (s["tickets"], s["tiers"][0]["used_bytes"]) == (0, before))
    # Its process is gone, so nobody can write to the slots: they are free without `RECLAIM_S`.
    assert "reclaiming reservations=1 rest_s=0\n" in node.said()
    assert watcher.cover(names("killed", 8)) == 0


def test_garbage_and_half_a_frame_harm_no_other_engine(start_node, engine, names):
    node = start_node()
    good, keys = engine(node.address), names("good", 4)
    good.save(keys)
    path = node.address.removeprefix("unix://")
    for data in (os.urandom(4096), encode(1, m.Hello(m.PROTOCOL, "x"))[:-3], b"\xff" * 16):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.connect(path)
            raw.sendall(data)
    assert good.read(keys) == (4, {"host": 4})
    assert "Traceback" not in node.said()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (m.Cover(b"x" * 17), "17 bytes of keys are not a multiple of 16"),
        (m.Cover(bytes(16 * 65_537)), "65537 keys, the limit is 65536; send fewer at once"),
        (m.Fetch(b"", -1.0), r"fetch\.deadline_s: -1 is not from 0 to 60"),
        (m.Fetch(b"", float("nan")), r"fetch\.deadline_s: nan is not"),
        (m.Reserve(b"", b"short", 0), r"reserve\.parent has 5 bytes, not 16"),
        (m.Reserve(b"k" * 16, b"p" * 16, 65_536), r"reserve\.depth: 65536 plus 1 blocks"),
        (m.Reserve(b"k" * 16, b"p" * 16, -1), r"reserve\.depth: -1"),
        (m.Reserve(b"k" * 16 * 4_097, b"p" * 16, 0), r"reserve\.keys: 4097 blocks, the limit is"),
        (m.Reserve(b"k" * 16, b"p" * 16, 0, b"seg"), r"reserve\.segment has 3 bytes, not 8"),
        (m.Hello(m.PROTOCOL, "again"), "hello was already sent"),
    ],
)
def test_a_request_out_of_bounds_is_refused_by_name(start_node, engine, request_, words):
    node = start_node()
    one = engine(node.address)
    with pytest.raises(RefusedError, match=words):
        one.call(request_)
    assert one.cover([]) == 0


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (m.Hello(3, "t"), "protocol version 3 is not supported, only 2; install"),
        (m.Hello(2, "t", b"f" * 16, 4096, 16, "nobody"), "'nobody' is not configured; known: def"),
        (m.Hello(2, "t", b"f" * 15, 4096, 16), r"hello\.fingerprint has 15 bytes, not 16"),
        (m.Hello(2, "t", b"f" * 16, 0, 16), r"hello\.raw_bytes is 0, not from 1 to"),
        (m.Hello(2, "t", b"f" * 16, 1 << 30, 16), r"hello\.raw_bytes is 1073741824, not"),
        (m.Hello(2, "t", b"f" * 16, 4096, 0), r"hello\.block_tokens is 0, not from 1"),
        (m.Hello(2, "t", b"f" * 16, 1 << 26, 16), r"one block takes .* raise tiers\.0\.capacity"),
    ],
)
def test_a_hello_out_of_bounds_is_refused_by_name(start_node, hello, words):
    node = start_node()
    with pytest.raises(RefusedError, match=words):
        Client(node.address, hello, 60)


def test_a_session_without_a_namespace_may_only_inspect(start_node):
    node = start_node()
    client = Client(node.address, m.Hello(m.PROTOCOL, "looker"), 60)
    assert client.arena is None
    with pytest.raises(RefusedError, match="named no namespace"):
        client.call(m.Cover(b""), m.Covered, 60)
    assert client.call(m.List(), m.ReportReply, 60) == m.ReportReply({"blocks": []})
    client.close()


def test_the_socket_is_private_to_its_user_and_removed_with_the_node(start_node, tmp_path):
    folder = tmp_path / "run" / "holdfast"
    node = start_node(listen=f"unix://{folder}/node.sock")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "node.sock").stat().st_mode) == 0o600
    assert node.stop() == 0
    assert not (folder / "node.sock").exists()


def test_a_socket_in_use_is_refused_by_name_and_stays(start_node, engine, names, tmp_path):
    node = start_node()
    config = tmp_path / "second.yaml"
    config.write_text(
        f"listen: {node.address}\ntiers: [{{kind: host, capacity: 16 MiB}}]\n", encoding="utf-8"
    )
    code, words = serve(config)
    assert code == 3
    assert f"is in use by process {node.process.pid}; stop that, or choose another path" in words
    assert engine(node.address).save(names("still", 2)) == 2


def test_a_socket_of_another_program_is_refused_and_stays(tmp_path):
    path = tmp_path / "node.sock"
    config = tmp_path / "node.yaml"
    config.write_text(f"listen: {path}\ntiers: [{{kind: host, capacity: 16 MiB}}]\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        code, words = serve(config)
    assert code == 3
    assert f'socket "{path}" is in use by another process' in words
    assert path.exists()


def test_a_file_that_is_no_socket_is_refused_and_stays(tmp_path):
    path = tmp_path / "node.sock"
    path.write_text("precious")
    config = tmp_path / "node.yaml"
    config.write_text(f"listen: {path}\ntiers: [{{kind: host, capacity: 16 MiB}}]\n")
    code, words = serve(config)
    assert code == 2
    assert "is there and is not a socket; choose another path" in words
    assert not list(tmp_path.glob("*.lock"))
    assert path.read_text() == "precious"


def test_a_folder_that_others_may_change_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    config = tmp_path / "node.yaml"
    config.write_text(f"listen: {folder}/n.sock\ntiers: [{{kind: host, capacity: 16 MiB}}]\n")
    code, words = serve(config)
    assert code == 2
    assert f'other users may change folder "{folder}"' in words


def test_two_nodes_on_one_folder_are_refused_by_name(start_node, engine, names, tmp_path):
    node = start_node()
    config = tmp_path / "second.yaml"
    second = {**node.config, "listen": f"{tmp_path}/second.sock"}
    config.write_text(json.dumps(second))
    code, words = serve(config)
    assert code == 3
    assert f"in use by process {node.process.pid}" in words
    assert not (tmp_path / "second.sock").exists()
    assert engine(node.address).save(names("still", 2)) == 2


def test_a_killed_node_is_gone_at_once_and_recovers_its_blocks(start_node, engine, names):
    node = start_node()
    one = engine(node.address)
    keys = names("warm", 12)
    one.save(keys)
    one.until_on_disk(12)
    hello = m.Hello(m.PROTOCOL, "link", one.fingerprint, 20_000, 128)
    link = ReconnectingClient(node.address, hello, 5.0, retry_s=0.1)
    before = link.wait(60)
    node.kill()
    with pytest.raises(NodeGoneError) as gone:
        before.call(m.Cover(b"".join(keys)), m.Covered, 200.0)
    assert "no answer" not in str(gone.value)  # it is told at once, not after the timeout
    node.start()
    after = link.wait(60)
    assert after is not None
    assert after.welcome.incarnation != before.welcome.incarnation
    assert after.welcome.domain_key == before.welcome.domain_key
    two = engine(node.address)
    two.until_recovered()
    assert two.read(keys) == (12, {"disk": 12})
    link.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_node_completes_pending_writes_and_exits_with_0(
    start_node, engine, names, number
):
    node = start_node()
    keys = names("drained", 40)
    engine(node.address).save(keys)
    node.end(number)
    assert node.process.returncode == 0
    node.start()
    two = engine(node.address)
    two.until_recovered()
    assert two.read(keys) == (40, {"disk": 40})


def test_a_node_that_hangs_is_gone_within_the_deadline(start_node, engine):
    node = start_node()
    one = engine(node.address, timeout_s=60)
    pause(node.process.pid)
    try:
        with pytest.raises(NodeGoneError, match=r"no answer within 0\.3 s"):
            one.client.call(m.Cover(b""), m.Covered, 0.3)
    finally:
        resume(node.process.pid)


def test_systemd_is_told_when_the_node_is_ready_and_when_it_stops(
    tmp_path, monkeypatch, start_node
):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        node = start_node()
        assert systemd.recv(100) == b"READY=1"
        assert node.stop() == 0
        assert systemd.recv(100) == b"STOPPING=1"


def test_the_default_domains_key_is_kept_private_beside_the_blocks(start_node, engine, tmp_path):
    node = start_node()
    key_file = tmp_path / "disk" / "default.key"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert engine(node.address).client.welcome.domain_key == key_file.read_bytes()


def memory_has(pid, secret):
    """Whether readable memory of a process has these bytes."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode = line.split()[:2]
            start, end = (int(at, 16) for at in span.split("-"))
            if "w" in mode and "p" in mode:
                memory.seek(start)
                if secret in memory.read(end - start):
                    return True
    return False


def test_a_core_dump_of_a_node_has_no_secret_in_it(tmp_path):
    secret = os.urandom(32)
    key, file = tmp_path / "acme.key", tmp_path / "node.yaml"
    key.write_bytes(secret)
    key.chmod(0o600)
    file.write_text(
        f"listen: unix://{tmp_path}/node.sock\n"
        "tiers: [{kind: host, capacity: 16 MiB}]\n"
        f"domains: {{acme: {{key_file: {key}}}}}\n"
    )
    argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(file)]
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=tmp_path) as process,
        contextlib.ExitStack() as undo,
    ):
        undo.callback(process.kill)
        assert process.stdout.readline().startswith(b"READY")
        assert Path(f"/proc/{process.pid}/coredump_filter").read_text().strip() == "00000010"
        assert memory_has(process.pid, secret), "it is there to be dumped"
        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (most, most))
        process.send_signal(signal.SIGABRT)
        process.wait()
    assert process.returncode == -signal.SIGABRT
    for core in tmp_path.glob("core*"):  # where the kernel writes it elsewhere, the filter is all
        assert secret not in core.read_bytes()


def test_a_drop_of_no_fingerprint_is_refused_and_drops_nothing(start_node, engine, names):
    one = engine(start_node().address)
    one.save(names("kept", 3))
    with pytest.raises(RefusedError, match="drop: the fingerprint is empty"):
        one.call(m.Drop(""))
    assert one.read(names("kept", 3))[0] == 3


@pytest.mark.parametrize(
    ("nbytes", "words"), [(15, "15 bytes, the minimum is 16"), (4_097, "more than 4096 bytes")]
)
def test_the_http_token_has_a_minimum_and_a_maximum_length(tmp_path, nbytes, words):
    file = tmp_path / "token"
    file.touch(0o600)
    host = {"kind": "host", "capacity": "16 MiB"}
    http = {"listen": "tcp://127.0.0.1:9464", "token_file": str(file)}
    config = parse({"listen": f"unix://{tmp_path}/n.sock", "tiers": [host], "http": http}, tmp_path)
    file.write_bytes(b"s" * nbytes)
    with pytest.raises(ConfigError, match=words):
        http_token(config)
    file.write_bytes(b"s" * 32 + b"\n")
    assert http_token(config) == b"s" * 32


def test_the_log_names_engines_and_hosts_but_no_operator_that_connects(
    start_node, engine, tmp_path
):
    node = start_node(listen=[f"unix://{tmp_path}/node.sock", f"tcp://127.0.0.1:{free_port()}"])
    target = TargetClient(node.addresses[1])
    for _ in range(5):
        with contextlib.closing(Client(node.address, m.Hello(m.PROTOCOL, "inspect"), 60)) as client:
            client.call(m.Status(), m.ReportReply, 60)
        assert target.stats(60)[1] is Outcome.OK
    assert "session" not in node.said()
    engine(node.address)
    target.exist(namespace_of(4_000), [b"k" * 16], 60)
    target.close()
    assert node.stop() == 0
    assert node.said().count("session peer='test engine'") == 1
    named = r"session peer='test engine' pid=\d+ domain=default fingerprint=[0-9a-f]+\n"
    assert re.search(named, node.said())
    assert node.said().count("session peer=") == 2


def test_a_host_starts_with_expired_credentials_and_logs_a_warning(tmp_path, caplog):
    files = Authority(tmp_path).issue("host", expires=dt.datetime(2026, 1, 1, tzinfo=dt.UTC))
    (file := tmp_path / "token").touch(mode=0o600)
    file.write_text(token.issue(b"k" * 32, "host-a", token.VERBS, 600, 1_700_000_000))
    config = {
        "listen": f"unix://{tmp_path}/n.sock",
        "tiers": [
            {"kind": "host", "capacity": "16 MiB"},
            {"kind": "pool", "members": "members.yaml"},
        ],
        "domains": {"default": {"key_file": "key"}},
        "tls": msgspec.to_builtins(files),
        "tokens": {"file": str(file)},
    }
    check_expiry(parse(config, tmp_path))
    expired = [line for line in caplog.messages if "expired on" in line]
    assert [line.partition(":")[0] for line in expired] == ["tls.cert", "tokens.file"]
    target = {**config, "listen": "tcp://127.0.0.1:7441"}
    with pytest.raises(ConfigError, match=r"^tls\.cert: '.*host\.crt': the certificate expired on"):
        check_expiry(parse(target, tmp_path))
