"""A node for commands to talk to."""

import os
import select
import subprocess
import sys
import time

import pytest

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

READY_S = 60
FINGERPRINT = b"fingerprint-16-b"
PAYLOAD_BYTES = 4096


@pytest.fixture
def serving(tmp_path):
    """Start `holdfast serve ARGUMENTS`, wait until it is ready; returns process and address."""
    running = []

    def start(*arguments, **options):
        argv = [sys.executable, "-m", "holdfast", "serve", *map(str, arguments)]
        log = (tmp_path / f"serve{len(running)}.log").open("wb")
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, **options)
        log.close()
        running.append(process)
        end, said = time.monotonic() + READY_S, b""
        while not said.endswith(b"\n"):
            ready = select.select([process.stdout], [], [], max(0, end - time.monotonic()))[0]
            part = os.read(process.stdout.fileno(), 4096) if ready else b""
            assert part, (tmp_path / f"serve{len(running) - 1}.log").read_text()
            said += part
        assert said.startswith(b"READY unix:///")
        return process, said.decode().split()[1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def node(serving, tmp_path):
    """A node on a host tier; returns its address."""
    file = tmp_path / "node.yaml"
    file.write_text(
        f"listen: unix://{tmp_path}/node.sock\ntiers: [{{kind: host, capacity: 16 MiB}}]\n"
    )
    return serving("--config", file)[1]


@pytest.fixture
def save():
    """Save blocks of random bytes at an address."""

    def at(address, count):
        hello = m.Hello(m.PROTOCOL, "test", FINGERPRINT, PAYLOAD_BYTES, 16)
        client = Client(address, hello, 60)
        reserved = client.call(m.Reserve(os.urandom(16 * count), FINGERPRINT, 0), m.Reserved, 60)
        for place in reserved.places:
            start = place + HEADER_BYTES
            client.arena.view[start : start + PAYLOAD_BYTES] = os.urandom(PAYLOAD_BYTES)
        assert client.call(m.Commit(reserved.ticket), m.Committed, 60).blocks == count
        return client

    return at
