"""A node whose domain quantises: sessions of Python get its codec with a record, or stay exact."""

import contextlib
import sys

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast import EngineGroup, GroupPages
from holdfast.cli import main
from holdfast.codec.int8 import Int8
from holdfast.errors import NodeGoneError, RefusedError
from holdfast.metrics import node_samples
from holdfast.probe import free_port
from holdfast.testing.embedded import fingerprint_for
from holdfast.testing.gates import permit
from holdfast.testing.row_pages import RowPages
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast_bench.harness.node import serve_argv
from holdfast_bench.harness.process import ChildProcess, wait_until

LAYOUT = holdfast.Layout.portable(
    layers=2, kv_heads=2, head_size=32, dtype="float16", block_tokens=64
)
MODEL = fingerprint_for(LAYOUT)
SECRET = bytes(range(32))
BLOCKS = 3
TOKENS = list(range(BLOCKS * 64))
KV = np.random.default_rng(1).standard_normal((BLOCKS, LAYOUT.raw_bytes // 2))
KV = KV.astype(np.float16)


class Node:
    """A real node with the domain `acme`, which asks for int8.

    Below its memory is a disk, or the pool of one target.
    """

    def __init__(self, folder, target=""):
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._below = f"{{kind: disk, path: {folder}/disk, capacity: 64 MiB}}"
        if target:
            (folder / "members.yaml").write_text(f"members: [{{id: target, address: {target}}}]")
            self._below = f"{{kind: pool, members: {folder}/members.yaml, deadline_s: 60}}"
        self.gates, self.log = folder / "gates", folder / "node.log"
        self.address = f"unix://{folder}/node.sock"
        for name, key in (("acme.key", SECRET), ("default.key", b"d" * 32)):
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(key)
        self.configure("int8")
        self._process = None

    @property
    def process(self):
        assert self._process is not None
        return self._process

    def configure(self, quantise):
        (self._folder / "node.yaml").write_text(
            f"listen: {self.address}\n"
            "tiers:\n"
            "  - {kind: host, capacity: 64 MiB}\n"
            f"  - {self._below}\n"
            "domains:\n"
            "  default: {key_file: default.key, seal: false}\n"
            f"  acme: {{key_file: acme.key, seal: false, quantise: {quantise}}}\n"
            "gates: gates\n"
        )

    def start(self):
        argv = [sys.executable, "-m", "holdfast", "serve", "--config", f"{self._folder}/node.yaml"]
        self._process = ChildProcess("node", argv, self.log, {})
        wait_until(self.process, self._serves, 60)

    def _serves(self):
        with contextlib.suppress(NodeGoneError):
            holdfast.open(self.address, domain="acme").close()
            return True
        return False


@pytest.fixture
def node(tmp_path_factory):
    one = Node(tmp_path_factory.mktemp("n"))
    one.start()
    yield one
    one.process.kill()


def kept():
    found = KV.copy()
    for block in found:
        assert Int8(LAYOUT).quantised(memoryview(block.view(np.uint8)))
    return found


def fetch(session):
    found = np.zeros_like(KV)
    assert session.fetch(TOKENS, into=found).blocks == BLOCKS
    return found


def test_a_session_is_exact_until_a_record_permits_the_codec(node, caplog, capsys):
    with holdfast.open(node.address, domain="acme") as store:
        exact = store.session(MODEL)
        assert "no gate record permits int8" in caplog.text
        assert "holdfast judge int8 --model FOLDER" in caplog.text
        assert "no gate record permits int8" in node.log.read_text()
        assert exact.namespace.fingerprint == MODEL.digest()
        exact.save(TOKENS, KV)
        assert (fetch(exact) == KV).all()
        permit(node.gates, SECRET, MODEL)
        session = store.session(MODEL)
        assert session.namespace.fingerprint == MODEL.quantised("int8", 1).digest()
        assert session.cover(TOKENS) == 0
        session.save(TOKENS, KV)
        assert (fetch(session) == kept()).all()
        assert (fetch(exact) == KV).all()
        status = store.status().quantise
        assert (status.domains, status.quantised, status.refusals) == (["acme"], BLOCKS, 1)
        figures = {each.name: each.value for each in node_samples(store.status())}
    assert figures["quantised_blocks_total"] == BLOCKS
    assert figures["quantised_bytes_total"] == BLOCKS * LAYOUT.raw_bytes
    assert figures["quantise_exact_blocks_total"] == 0
    assert figures["quantise_refusals_total"] == 1
    assert main(["inspect", "--node", node.address]) == 0
    shown = capsys.readouterr().out
    line = "acme: 3 blocks quantised (96 KiB), 0 left exact; 1 session exact without a gate record"
    assert f"int8    {line}" in shown
    for command in (["stats"], ["top", "--views", "1"]):
        assert main([*command, "--node", node.address]) == 0
        assert f"int8: {line}" in " ".join(capsys.readouterr().out.split())


def test_an_engine_gets_the_codec_of_its_domain_as_a_session_does(node):
    permit(node.gates, SECRET, MODEL)
    memory = RowPages(2 * BLOCKS, LAYOUT.raw_bytes)
    memory.rows[:BLOCKS] = KV.view(np.uint8)
    with contextlib.closing(memory), holdfast.open(node.address, domain="acme") as store:
        with holdfast.open_engine(store, [EngineGroup(MODEL)]) as client:
            context = client.context(TOKENS)
            pages = [GroupPages(memory.device, range(BLOCKS))]
            assert client.save(context, [range(BLOCKS)], pages).wait(60).blocks == BLOCKS
            ticket = client.lookup(context).wait(60)
            pages = [GroupPages(memory.device, range(BLOCKS, 2 * BLOCKS))]
            assert client.load(ticket, pages).wait(60).tokens == len(TOKENS)
        assert (memory.rows[BLOCKS:].view(np.float16) == kept()).all()
        assert (fetch(store.session(MODEL)) == kept()).all()


def test_a_session_reconnects_with_the_blocks_that_it_began_with(node):
    permit(node.gates, SECRET, MODEL)
    with holdfast.open(node.address, domain="acme") as store:
        session = store.session(MODEL)
        session.save(TOKENS, KV)
        node.process.kill()
        node.start()

        def found():
            with contextlib.suppress(NodeGoneError):
                return session.cover(TOKENS) == len(TOKENS) or session.save(TOKENS, KV) > 0
            return False

        wait_until(node.process, found, 60)
        assert (fetch(session) == kept()).all()
        node.process.kill()
        node.configure("none")
        node.start()

        def refusal():
            try:
                session.cover(TOKENS)
            except NodeGoneError:
                return ""
            except RefusedError as error:
                return str(error)
            return ""

        wait_until(node.process, lambda: bool(refusal()), 60)
        assert "domain 'acme' stores exact blocks only" in refusal()


def hello(fingerprint, **changes):
    layout = fingerprint.representation
    fields = {
        "fingerprint": fingerprint.digest(),
        "raw_bytes": layout.raw_bytes,
        "block_tokens": layout.block_tokens,
        "description": msgspec.json.encode(fingerprint).decode(),
    }
    return m.Hello(m.PROTOCOL, "test", domain="acme", **{**fields, **changes})


def welcome(node, sent):
    client = Client(node.address, sent, 60)
    client.close()
    return client.welcome


def test_a_client_that_does_not_describe_its_blocks_stays_exact(node):
    permit(node.gates, SECRET, MODEL)
    for description in ("a model", "{}", hello(MODEL.quantised("int8", 1)).description):
        answer = welcome(node, hello(MODEL, description=description))
        assert answer.codec == ""
        assert "this client does not describe them" in answer.exact_because
    assert welcome(node, hello(MODEL, description="")).exact_because == ""
    offered = welcome(node, hello(MODEL))
    assert (offered.codec, offered.codec_version, offered.exact_because) == ("int8", 1, "")


def test_quantised_blocks_of_other_sizes_than_described_are_refused(node):
    permit(node.gates, SECRET, MODEL)
    quantised = MODEL.quantised("int8", 1)
    assert welcome(node, hello(quantised)).codec == ""
    with pytest.raises(
        RefusedError, match=r"hello\.raw_bytes is 7 and block_tokens 64; the layout"
    ):
        welcome(node, hello(quantised, raw_bytes=7))


def test_blocks_that_one_host_quantised_are_read_by_another_through_a_pool(tmp_path_factory):
    folder, blocks = tmp_path_factory.mktemp("p"), MODEL.quantised("int8", 1).digest()
    address = f"tcp://127.0.0.1:{free_port()}"
    config = {"listen": address, "tiers": [{"kind": "host", "capacity": "64 MiB"}]}
    argv = serve_argv(folder / "target.yaml", config)
    hosts = [Node(folder / name, address) for name in ("a", "b")]
    with contextlib.ExitStack() as undo:
        target = ChildProcess("target", argv, folder / "target.log", {})
        undo.callback(target.kill)
        for host in hosts:
            permit(host.gates, SECRET, MODEL)
            host.start()
            undo.callback(host.process.kill)
        with holdfast.open(hosts[0].address, domain="acme") as store:
            session = store.session(MODEL)
            assert session.namespace.fingerprint == blocks
            session.save(TOKENS, KV)
            wait_until(target, lambda: not store.status().waiting_to_write, 60)
            [codec] = store.status().codecs
            assert (codec.quantised, codec.mode) == (BLOCKS, "auto")
            assert 0 < codec.stored_bytes < 0.6 * codec.raw_bytes
        with holdfast.open(hosts[1].address, domain="acme") as store:
            session, found = store.session(MODEL), np.zeros_like(KV)
            wait_until(target, lambda: session.cover(TOKENS) == len(TOKENS), 60)
            landed = session.fetch(TOKENS, into=found, deadline_s=60.0)
            assert landed.sources == {"pool": BLOCKS}
            assert (found == kept()).all()
            assert store.status().codecs[0].decoded == BLOCKS
