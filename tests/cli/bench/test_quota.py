"""`holdfast bench quota` judges what it measured: by turns, worst against worst."""

import contextlib

import pytest

from holdfast.cli.bench import quota

pytest.importorskip("rich")


class Measured:
    """Stands for the two domains: 100 ms in peace, as slow as it is told in the flood."""

    slow = 1.0

    def __init__(self, _folder, share):
        self.share = share
        self.turns = ""
        self.flood_bytes = 0

    @contextlib.contextmanager
    def flooded(self, name):
        assert name == "flood"
        self.turns += "F"
        yield
        self.turns += "."

    def fetch(self, name, number):
        assert name == "victim"
        flooded = self.turns.endswith("F")
        self.flood_bytes += flooded
        if flooded and number % 21 == 10:  # the first one in each flood
            return 0.9
        return 0.1 * (self.slow if flooded and number % 21 == 15 else 1.0)

    def close(self):
        assert self.turns == "F.F."


@pytest.mark.parametrize(("slow", "status"), [(1.1, 0), (1.5, 1)])
def test_the_worst_fetch_in_the_flood_is_held_against_the_worst_in_peace(
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
        assert rows[name]["fetches"] == 20
        assert rows[name]["onset_ms"] == pytest.approx(900)
        assert rows[name]["flood_disk"] > 0
    assert rows["quota.saturating.share1"]["ok"] is None
    assert pauses == [0.48] * 84 + [0.0] * 42
