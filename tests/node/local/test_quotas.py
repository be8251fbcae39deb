"""A real node with two domains: one floods, the other keeps what it has."""

import contextlib
import os

import pytest

from holdfast.errors import Outcome, RefusedError
from holdfast.probe import free_port
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.wire.remote.client import TargetClient

MIB = 1 << 20
HOST = {"kind": "host", "capacity": 64 * MIB}


@pytest.fixture
def keyed(tmp_path):
    """Return the options of a domain with a key of its own, and more."""

    def key(name, **options):
        file = tmp_path / f"{name}.key"
        file.write_bytes(os.urandom(32))
        file.chmod(0o600)
        return {"key_file": str(file), "seal": False, **options}

    return key


def fill(status, name):
    return next(entry for entry in status["domains"] if entry["domain"] == name)


def test_a_flooding_domain_stays_within_its_quota_and_evicts_no_other_domain(
    start_node, engine, names, keyed, tmp_path
):
    disk = {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": 64 * MIB}
    flood = keyed("flood", quota_bytes={"host": 8 * MIB, "disk": 4 * MIB}, share=0.5)
    victim = keyed("victim", reserved_bytes={"host": 16 * MIB})
    node = start_node(tiers=[HOST, disk], domains={"flood": flood, "victim": victim})
    one, two = engine(node.address, domain="flood"), engine(node.address, domain="victim")
    kept = names("kept", 100)
    assert two.save(kept) == 100
    for number in range(12):
        one.save(names(f"flood/{number}", 100))
    one.until(lambda status: not status["waiting_to_write"])
    used = fill(one.status(), "flood")["used_bytes"]
    assert 0 < used["host"] <= 8 * MIB
    assert 0 < used["disk"] <= 4 * MIB
    assert two.read(kept) == (100, {"host": 100})
    assert fill(two.status(), "victim")["reserved_bytes"] == 16 * MIB


def test_an_engine_whose_block_exceeds_the_quota_is_refused_at_hello(
    start_node, engine, keyed, tmp_path
):
    disk = {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": 64 * MIB}
    small = keyed("small", quota_bytes={"disk": 8192})
    node = start_node(tiers=[HOST, disk], domains={"small": small})
    told = r"takes 20480 bytes, the quota of domain 'small' on disk is 8192; raise domains\.small"
    with pytest.raises(RefusedError, match=told):
        engine(node.address, domain="small")


def test_a_target_with_reserved_memory_also_stores_blocks_of_unknown_domains(
    start_node, engine, names, keyed, tmp_path
):
    listen = [f"unix://{tmp_path}/node.sock", f"tcp://127.0.0.1:{free_port()}"]
    ours = keyed("ours", reserved_bytes={"host": 16 * MIB}, quota_bytes={"host": 32 * MIB})
    node = start_node(listen=listen, tiers=[HOST], domains={"ours": ours})
    one, kept, namespace = (
        engine(node.address, domain="ours"),
        names("kept", 100),
        namespace_of(MIB),
    )
    assert one.save(kept) == 100
    with contextlib.closing(TargetClient(node.addresses[1])) as target:
        for number in range(80):
            record = record_of(namespace, key_of(number))
            assert target.put([record], 60) == [Outcome.OK], target.refusal
        held = target.exist(namespace, [key_of(number) for number in range(80)], 60).held
        assert not held[0], "more than there is memory"
        assert held[79]
    assert one.read(kept) == (100, {"host": 100})
    assert "request failed" not in node.said()
