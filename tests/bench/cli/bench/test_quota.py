"""`holdfast bench quota` judges what it measured: by turns, one p99 against the other."""

import argparse
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from holdfast.errors import ConfigError, HoldfastError
from holdfast_bench.cli.bench import quota

pytest.importorskip("rich")


WORST = (30, 80)
"""One fetch of each kind that stood still: not what a hundred are like."""


class Measured:
    """Stands for the two domains: 100 ms in peace, as slow as it is told in the flood."""

    slow = 1.0

    def __init__(self, _folder, share):
        self.share = share
        self.work_slots = ""
        self.flood_bytes = 0

    @contextlib.contextmanager
    def flooded(self):
        self.work_slots += "F"
        yield
        self.work_slots += "."

    def fetch(self, name, number):
        assert name == "victim"
        flooded = self.work_slots.endswith("F")
        self.flood_bytes += flooded
        at = number % 101  # 50 in peace, one that comes first in the flood, 50 more
        if at == 50:
            return 0.9
        if number in WORST:
            return 5.0
        return 0.1 * (self.slow if flooded and at == 90 else 1.0)

    def close(self):
        assert self.work_slots == "F.F."


@pytest.mark.parametrize(("slow", "status"), [(1.1, 0), (1.5, 1)])
def test_the_p99_during_the_flood_is_compared_with_the_p99_without_it(
    monkeypatch, reported, slow, status
):
    monkeypatch.setattr(quota, "_Bench", Measured)
    monkeypatch.setattr(Measured, "slow", slow)
    pauses = []
    monkeypatch.setattr(quota.time, "sleep", pauses.append)
    monkeypatch.setattr(quota, "WINDOW_S", 0.0)
    ended, found = reported("bench", "quota", "--rounds", "2")
    rows = {row["what"]: row for row in found}
    assert ended == status
    for name in ("quota.flooded.share1", "quota.flooded.share16"):
        assert rows[name]["ratio"] == pytest.approx(slow)
        assert rows[name]["goal"] == 1.2
        assert rows[name]["ok"] is (status == 0)
        assert rows[name]["fetches"] == 100
        assert rows[name]["onset_ms"] == pytest.approx(900)
        assert rows[name]["flood_disk"] > 0
    assert rows["quota.saturating.share1"]["ok"] is None
    assert [round(pause, 6) for pause in pauses] == [0.12] * 404 + [0.0] * 202


def test_an_incomplete_fetch_is_an_error_but_not_a_usage_error(monkeypatch, tmp_path):
    for name, value in (("CONTEXTS", 1), ("HOST_BYTES", 32 << 20), ("DISK_BYTES", 64 << 20)):
        monkeypatch.setattr(quota, name, value)
    with contextlib.closing(quota._Bench(tmp_path, 1.0)) as bench:
        assert bench.fetch("victim", 0) > 0
        bench.store.drop("*")
        with pytest.raises(HoldfastError, match="fetched 0 of 32 blocks within 60 s") as raised:
            bench.fetch("victim", 0)
    assert not isinstance(raised.value, ConfigError)


def test_too_few_rounds_for_a_99th_percentile_are_refused():
    with pytest.raises(ConfigError, match="--rounds: 1 is fewer than 2; raise it"):
        quota.add_arguments(parser := argparse.ArgumentParser()) or parser.parse_args(
            ["--rounds", "1"]
        )
    fetches = [0.1] * (quota.QUICK_ROUNDS * quota.FETCHES_A_PHASE - 1)
    assert quota.percentile_99([*fetches, 9.0]) == 0.1


def test_concurrent_flood_clients_lose_no_counted_bytes(monkeypatch):
    class Raced(quota._Bench):
        """Its counter is read by two threads before one writes, if nothing keeps them apart."""

        def __init__(self):
            fetched = SimpleNamespace(places=[0] * quota.BLOCKS, lease=1)
            self.store = SimpleNamespace(
                share=lambda _: 1.0, fetch=lambda *_: fetched, release=lambda _: None
            )
            queue = SimpleNamespace(submit=lambda _, call: SimpleNamespace(result=call))
            self.threads = SimpleNamespace(fetching=queue)
            namespace = SimpleNamespace(domain=b"d" * 16)
            contexts = SimpleNamespace(namespace=namespace, leave_host=lambda _: None)
            self._contexts = {"flood": contexts}
            self._chains = {"flood": [[b"k"]] * quota.CONTEXTS}
            self._counting = threading.Lock()
            self._readers = threading.Barrier(2)
            self._counted = 0

        @property
        def flood_bytes(self):
            counted = self._counted
            with contextlib.suppress(threading.BrokenBarrierError):
                self._readers.wait(0.2)
            return counted

        @flood_bytes.setter
        def flood_bytes(self, nbytes):
            self._counted = nbytes

    bench = Raced()
    with ThreadPoolExecutor(2) as clients:
        list(clients.map(bench.fetch, ("flood", "flood"), (0, 1)))
    assert bench._counted == 2 * quota.BLOCKS * quota.BLOCK_BYTES
