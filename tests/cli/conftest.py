"""Commands run as a user runs them, and a node for them to talk to."""

import json
import os
import select
import subprocess
import sys
import time

import pytest

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.cli import main, measuring
from holdfast.wire import messages as m
from holdfast.wire.client import Client

READY_S = 60
FINGERPRINT = b"fingerprint-16-b"
PAYLOAD_BYTES = 4096


@pytest.fixture
def holdfast():
    """Run `holdfast ARGUMENTS`; returns the finished process."""

    def run(*arguments, **options):
        argv = [sys.executable, "-m", "holdfast", *map(str, arguments)]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=120, check=False, **options
        )

    return run


@pytest.fixture
def reported(tmp_path):
    """Run `holdfast ARGUMENTS --json FILE` here; returns the status and the rows that it wrote."""

    def run(*arguments):
        target = tmp_path / "report.json"
        status = main([*map(str, arguments), "--json", str(target)])
        return status, json.loads(target.read_text())["rows"]

    return run


@pytest.fixture
def engine_is_here(monkeypatch):
    """Let commands believe that vLLM is installed."""
    monkeypatch.setattr(measuring, "find_spec", lambda _: True)


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
        client = Client(address, hello, 10)
        reserved = client.call(m.Reserve(os.urandom(16 * count), FINGERPRINT, 0), 10)
        for place in reserved.places:
            start = place + HEADER_BYTES
            client.arena.view[start : start + PAYLOAD_BYTES] = os.urandom(PAYLOAD_BYTES)
        assert client.call(m.Commit(reserved.ticket), 10).blocks == count
        return client

    return at
