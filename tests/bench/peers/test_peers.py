"""Peers are measured by what really came back, and leave nothing running."""

import subprocess
import sys

import pytest

from holdfast.errors import HoldfastError
from holdfast.report import Row, share
from holdfast_bench.measure import peers
from holdfast_bench.measure.peers import RecordRing, beside_rows, peer_rows
from holdfast_bench.peers import lmcache_server, mooncake_server, plain_sockets, valkey_server

KIB = 1 << 10


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(plain_sockets, "POOL_BYTES", 4 << 20)
    monkeypatch.setattr(peers, "LEASED_BYTES", 64 << 20)
    monkeypatch.setattr(peers, "SIZES", (4 * KIB, 64 * KIB))
    monkeypatch.setattr(peers, "EXIST_KEYS", 100)
    # It would have to start anew for every size; its own tests start it.
    monkeypatch.setattr(lmcache_server, "installed", lambda: False)


def loads(module):
    script = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(script, capture_output=True, check=False).returncode == 0


def installed():
    """The peers that this machine can run."""
    redis = valkey_server.program() and loads("redis")
    mooncake = not mooncake_server.why_not()
    return [name for name, there in (("redis", redis), ("mooncake", mooncake)) if there]


def test_a_mooncake_that_fails_to_load_is_a_row_and_other_peers_are_measured(tmp_path, monkeypatch):
    """Its package may be there without the system's libraries."""
    if not (valkey_server.program() and loads("redis")):
        pytest.skip("neither Redis nor its client is installed")
    monkeypatch.setattr(mooncake_server, "installed", lambda: True)
    monkeypatch.setattr(mooncake_server.subprocess, "run", refuses := Refuses())
    rows = {row.what: row for row in peer_rows(tmp_path, 1, lambda _: None)}
    assert refuses.asked[1:] == ["-c", "import mooncake.store"]
    assert rows["peer.mooncake"].more["why"].endswith("libibverbs.so.1): apt install libibverbs1")
    assert rows["peer.redis.get.4KiB"].value > 0
    assert "peer.mooncake.get.4KiB" not in rows


class Refuses:
    def __call__(self, argv, **_):
        self.asked = argv
        return subprocess.CompletedProcess(argv, 1, "", "Traceback\nImportError: libibverbs.so.1\n")


def test_every_installed_peer_has_a_row_for_each_operation(tmp_path):
    if not (names := installed()):
        pytest.skip("neither Redis with its client nor Mooncake Store is installed")
    told = []
    rows = [row for row in peer_rows(tmp_path, 1, told.append) if row.value is not None]
    what = {row.what for row in rows}
    for name in names:
        ways = [
            f"peer.{name}.{verb}.{size}" for verb in ("get", "put") for size in ("4KiB", "64KiB")
        ]
        assert what >= {*ways, *(f"{way}x32" for way in ways), f"peer.{name}.exist.100"}
    assert {row.unit for row in rows} == {"GB/s", "us", "ms"}
    assert all(row.value > 0 and row.goal is None and row.ok is None for row in rows)
    assert len(told) == 2 * len(names)


def test_a_peer_that_does_not_start_is_a_row_that_says_why(tmp_path, monkeypatch):
    def fails(*_):
        raise ModuleNotFoundError("No module named 'aiofile'")

    monkeypatch.setattr(valkey_server, "program", lambda: None)
    monkeypatch.setattr(mooncake_server, "installed", lambda: False)
    monkeypatch.setattr(lmcache_server, "installed", lambda: True)
    monkeypatch.setattr(lmcache_server, "LMCachePeer", fails)
    row = peer_rows(tmp_path, 1, print)[-1]
    assert (row.what, row.value, row.ok) == ("peer.lmcache", None, None)
    assert row.more["why"] == "No module named 'aiofile'"


def test_a_peer_that_is_not_installed_is_a_row_that_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(valkey_server, "program", lambda: None)
    monkeypatch.setattr(mooncake_server, "installed", lambda: False)
    monkeypatch.setattr(lmcache_server, "installed", lambda: False)
    rows = peer_rows(tmp_path, 1, print)
    assert [row.what for row in rows] == ["peer.redis", "peer.mooncake", "peer.lmcache"]
    assert {(row.value, row.ok) for row in rows} == {(None, None)}
    assert all(" installed" in row.more["why"] for row in rows)


def test_a_peer_that_returns_wrong_bytes_is_an_error():
    ring = RecordRing()
    ring.fill(4 * KIB)

    class Liar:
        def get(self, keys, into):
            for place in into:
                place[:] = bytes(len(place))

    with pytest.raises(HoldfastError, match="a received record is"):
        peers._get(Liar(), ring, 4)


def test_the_pool_is_compared_with_every_peer_of_the_same_run():
    rows = [
        share("pool.get.2MiBx32", 6.0, "GB/s", 6.4, 0.9),
        Row(what="peer.redis.get.2MiBx32", value=1.0, unit="GB/s"),
        Row(what="peer.mooncake.get.2MiBx32", value=2.4, unit="GB/s"),
        Row(what="peer.lmcache", value=None, unit=""),
    ]
    mooncake, redis = beside_rows(rows)
    assert (mooncake.what, redis.what) == (
        "pool.get.2MiBx32.over_mooncake",
        "pool.get.2MiBx32.over_redis",
    )
    assert (mooncake.value, mooncake.goal, mooncake.ok) == (2.5, 3.0, False)
    assert (redis.value, redis.goal, redis.ok) == (6.0, 6.0, True)
    assert redis.more == {"plain": 6.4}
    assert list(beside_rows(rows[1:])) == []


def test_a_comparison_with_a_peer_that_was_not_measured_says_why():
    ours = share("pool.get.2MiBx32", 6.0, "GB/s", 6.4, 0.9)
    rows = [
        ours,
        Row(what="peer.redis.get.64KiBx32", value=1.0, unit="GB/s"),
        Row(what="peer.mooncake", value=None, unit="", more={"why": "no master"}),
    ]
    mooncake, redis = beside_rows(rows)
    assert (mooncake.what, mooncake.value, mooncake.ok) == (
        "pool.get.2MiBx32.over_mooncake",
        None,
        None,
    )
    assert mooncake.more == {"why": "no master"}
    assert redis.what == "pool.get.2MiBx32.over_redis"
    assert redis.more == {"why": "this run has no peer.redis.get.2MiBx32"}
    assert list(beside_rows([ours])) == [], "a run without peers has nothing to compare"
