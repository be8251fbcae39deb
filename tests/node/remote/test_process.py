"""A target in a process of its own: who gets in, and what a client sees when it stops or dies."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.buffers import aligned_buffer
from holdfast.codec import pack
from holdfast.codec.pack import verify
from holdfast.errors import Outcome, RefusedError
from holdfast.limits import MIB
from holdfast.probe import free_port
from holdfast.testing.payloads import is_right, key_of, namespace_of, record_of
from holdfast.wire.remote import token
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials, TlsFiles
from holdfast_bench.harness.certificates import Authority

NAMESPACE = namespace_of(MIB)
KEYS = [key_of(i) for i in range(24)]
RECORDS = [record_of(NAMESPACE, key) for key in KEYS]
KEY = bytes(range(32))
MARK = b"\xa5"
SLACK_S = 2.0


@pytest.fixture
def start(start_node):
    """Call with settings; returns a running target and a function that makes clients for it."""
    with contextlib.ExitStack() as undo:

        def make(**settings):
            node = start_node(listen=f"tcp://127.0.0.1:{free_port()}", **settings)

            def client(**options):
                target = TargetClient(node.address, Credentials(**options))
                undo.callback(target.close)
                return target

            return node, client

        yield make


@pytest.fixture
def secret(tmp_path):
    """Call to write a file that only its owner may read; returns its path."""

    def write(name, data):
        file = tmp_path / name
        file.touch(mode=0o600)
        file.write_bytes(data)
        return str(file)

    return write


def issued(key=KEY, may=token.VERBS, now=None, lifetime_s=600):
    return token.issue(key, "test", may, lifetime_s, now or time.time()).encode()


def buffers(count=24):
    made = [aligned_buffer(NAMESPACE.slot_bytes) for _ in range(count)]
    for buffer in made:
        buffer[:] = MARK * len(buffer)
    return made


def round_trip(target):
    assert target.put(RECORDS, 60) == [Outcome.OK] * len(KEYS)
    into = buffers()
    assert target.get(NAMESPACE, KEYS, into, 60) == (len(KEYS), Outcome.OK, "")
    assert all(is_right(record, NAMESPACE, key) for key, record in zip(KEYS, into, strict=True))


def tls_options(files):
    return msgspec.structs.asdict(files)


def test_records_on_a_target_survive_kill_9(start):
    node, client = start()
    target = client()
    round_trip(target)
    end = time.monotonic() + 120
    while target.stats(60)[0].waiting_to_write:
        assert time.monotonic() < end
        time.sleep(0.02)
    node.kill()
    assert target.get(NAMESPACE, KEYS, buffers(), 60).outcome is Outcome.GONE
    node.start()
    while target.stats(60)[0].recovery_s is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    into = buffers()
    assert target.get(NAMESPACE, KEYS, into, 60).blocks == len(KEYS)
    assert all(is_right(record, NAMESPACE, key) for key, record in zip(KEYS, into, strict=True))


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 3.0)])
def test_a_get_ends_in_time_if_its_target_dies_or_stops_during_transfers(
    start, number, within_s, stalls
):
    node, client = start()
    target = client()
    round_trip(target)
    seen = []

    def keep_asking():
        while True:
            into = buffers()
            got = target.get(NAMESPACE, KEYS, into, within_s)
            seen.append(got)
            for key, record in zip(KEYS[: got.blocks], into, strict=False):
                assert is_right(record, NAMESPACE, key)
            if got.outcome is not Outcome.OK:
                left.extend(into)
                return

    left = []
    threads = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(seen) < 6 and any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
    os.kill(node.process.pid, number)
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    expected = Outcome.GONE if number == signal.SIGKILL else Outcome.LATE
    assert [got.outcome for got in seen if got.outcome != "ok"] == [expected] * 3
    before = [bytes(buffer) for buffer in left]
    if number == signal.SIGSTOP:
        assert target.put(RECORDS[:1], 0.3) == [Outcome.LATE]
        os.kill(node.process.pid, signal.SIGCONT)
        end = time.monotonic() + 60
        while target.exist(NAMESPACE, KEYS, 60).outcome is not Outcome.OK:
            assert time.monotonic() < end
        round_trip(target)
    assert [bytes(buffer) for buffer in left] == before


def test_a_target_admits_only_valid_certificates(start, tmp_path):
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    files = authority.issue("target")
    node, client = start(tls=tls_options(files))
    round_trip(client(tls=authority.issue("peer")))
    stranger = other.issue("stranger")
    for wrong in (
        stranger,
        TlsFiles(stranger.cert, stranger.key, str(authority.file)),
        msgspec.structs.replace(authority.issue("elsewhere"), ca=str(other.file)),
    ):
        with pytest.raises(RefusedError, match="no TLS with mutual certificates"):
            client(tls=wrong).exist(NAMESPACE, KEYS, 60)
    assert client().exist(NAMESPACE, KEYS, 0.5).outcome in (Outcome.LATE, Outcome.GONE)
    assert "expired" not in node.said()


def test_a_target_with_a_certificate_for_another_host_is_rejected(start, tmp_path):
    authority = Authority(tmp_path)
    _, client = start(tls=tls_options(authority.issue("target", "192.0.2.1")))
    with pytest.raises(RefusedError, match="the names in the certificates"):
        client(tls=authority.issue("peer")).exist(NAMESPACE, KEYS, 60)


def test_a_target_admits_only_valid_tokens(start, secret):
    _, client = start(tokens={"key_file": secret("key", KEY)})
    round_trip(client(token_file=secret("good", issued())))
    for name, line, words in (
        ("expired", issued(now=time.time() - 700), "expired"),
        ("early", issued(now=time.time() + 300), "the limit is 600 s"),
        ("forged", issued(key=b"x" * 32), "not made with this target's key"),
    ):
        with pytest.raises(RefusedError, match=words):
            client(token_file=secret(name, line)).exist(NAMESPACE, KEYS, 60)
    with pytest.raises(RefusedError, match="this target requires one"):
        client().exist(NAMESPACE, KEYS, 60)


def test_a_token_permits_only_the_operations_it_names(start, secret):
    _, client = start(tokens={"key_file": secret("key", KEY)})
    reader = client(token_file=secret("reader", issued(may=("read",))))
    writer = client(token_file=secret("writer", issued(may=("write",))))
    assert reader.put(RECORDS[:2], 60) == [Outcome.UNSENT] * 2
    assert "may read, not write; it writes no new blocks to them" in reader.refusal
    assert writer.put(RECORDS[:2], 60) == [Outcome.OK] * 2
    assert reader.exist(NAMESPACE, KEYS[:2], 60).held == b"\1\1"
    assert reader.delete(NAMESPACE, KEYS[:2], 60).outcome is Outcome.UNSENT
    assert writer.get(NAMESPACE, KEYS[:2], buffers(2), 60).outcome is Outcome.UNSENT
    assert "may write, not read" in writer.refusal


def test_a_target_may_require_both_a_certificate_and_a_token(start, secret, tmp_path):
    authority = Authority(tmp_path)
    files = authority.issue("both")
    _, client = start(tls=tls_options(files), tokens={"key_file": secret("key", KEY)})
    round_trip(client(tls=files, token_file=secret("token", issued())))
    with pytest.raises(RefusedError, match="requires one"):
        client(tls=files).exist(NAMESPACE, KEYS, 60)


def test_a_socket_and_an_address_serve_one_store(start_node, engine, names, payload, tmp_path):
    remote = f"tcp://127.0.0.1:{free_port()}"
    node = start_node(listen=[f"unix://{tmp_path}/node.sock", remote])
    local, keys = engine(node.address), names("shared", 3)
    assert local.save(keys) == 3
    domain = domain_id(local.client.welcome.domain_key)
    nbytes = len(payload(keys[0]))
    namespace = Namespace(local.fingerprint, domain, nbytes, 128)
    target, into = TargetClient(remote), [aligned_buffer(namespace.slot_bytes) for _ in keys]
    assert target.get(namespace, keys, into, 60).blocks == 3
    for key, record in zip(keys, into, strict=True):
        assert verify(record, key, namespace.fingerprint, nbytes) is Outcome.OK
        assert pack.payload(record, nbytes) == payload(key)
    assert target.delete(namespace, keys[2:], 60).blocks == 1
    assert local.cover(keys) == 2
    target.close()


def test_an_exposed_address_without_credentials_does_not_start(tmp_path):
    argv = [sys.executable, "-m", "holdfast", "serve", "--listen", "tcp://0.0.0.0:7441"]
    argv += ["--set", "tiers.0.kind=host", "--set", "tiers.0.capacity=16 MiB"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "listen: 'tcp://0.0.0.0:7441' can be reached from other machines" in done.stderr
    assert "set tls, or tokens.key_file" in done.stderr
