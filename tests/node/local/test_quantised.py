"""The offer of a lossy codec: its gate record is a file, whose drive may hang."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import pytest

from holdfast.blocks.layout import Layout
from holdfast.errors import RefusedError
from holdfast.fairness.fair_queue import WorkItem
from holdfast.node.local import quantised
from holdfast.node.local.threads import NodeThreads
from holdfast.regular_file import read_regular
from holdfast.testing.embedded import fingerprint_for
from holdfast.testing.gates import permit
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

LAYOUT = Layout.portable(layers=2, kv_heads=2, head_size=32, dtype="float16", block_tokens=64)
MODEL = fingerprint_for(LAYOUT)
SECRET = b"d" * 32


def hello_of(fingerprint, domain="default"):
    layout = fingerprint.representation
    return m.Hello(
        protocol=m.PROTOCOL,
        peer="test",
        fingerprint=fingerprint.digest(),
        raw_bytes=layout.raw_bytes,
        block_tokens=layout.block_tokens,
        domain=domain,
        description=msgspec.json.encode(fingerprint).decode(),
    )


class HungDrive:
    """Reads of gate records that return when they are let."""

    def __init__(self):
        self.asked, self.answers = threading.Event(), threading.Event()

    def read(self, path, bytes_max):
        self.asked.set()
        assert self.answers.wait(60)
        return read_regular(path, bytes_max)


@pytest.fixture
def drive(monkeypatch):
    drive = HungDrive()
    monkeypatch.setattr("holdfast.store.quantise.read_regular", drive.read)
    yield drive
    drive.answers.set()


@pytest.fixture
def node(node_here, drive, tmp_path):
    """A node with a permit for the model in its domain `default`, and the domain `other`."""
    permit(tmp_path / "gates", SECRET, MODEL)
    return node_here(gates=tmp_path / "gates", other=1 << 20)


def test_a_gate_record_on_a_drive_that_hangs_does_not_delay_other_sessions(
    node, drive, monkeypatch
):
    monkeypatch.setattr(quantised, "RECORD_S", 60.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(Client, node.address, hello_of(MODEL), 60)
        assert drive.asked.wait(60)
        other = Client(node.address, hello_of(MODEL, "other"), 10)
        assert not waiting.done()
        drive.answers.set()
        client = waiting.result(60)
    assert (client.welcome.codec, client.welcome.exact_because) == ("int8", "")
    for each in (other, client):
        each.close()


def test_blocks_stay_exact_if_the_gate_record_is_not_read_in_time(node, monkeypatch):
    monkeypatch.setattr(quantised, "RECORD_S", 0.01)
    client = Client(node.address, hello_of(MODEL), 60)
    assert client.welcome.codec == ""
    assert "the gate record was not read from" in client.welcome.exact_because
    client.close()
    with pytest.raises(RefusedError, match=r"quantised blocks: .* was not read from .* restart"):
        Client(node.address, hello_of(MODEL.quantised("int8", 1)), 60)


def test_a_node_ends_while_a_gate_record_is_being_read(drive, tmp_path):
    threads = NodeThreads()
    reading = threads.opening.submit(WorkItem(b"d"), partial(drive.read, tmp_path / "none", 1))
    assert drive.asked.wait(60)
    threads.close()
    assert not reading.done()
