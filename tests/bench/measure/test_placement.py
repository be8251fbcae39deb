"""What moves with a member, what a loss leaves and what a crowd costs, counted for the report."""

import pytest

from holdfast.membership.placement import Placement
from holdfast_bench.measure import placement, pool
from holdfast_bench.measure.placement import placement_rows


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(pool, "HOST_BYTES", 64 << 20)
    for name, value in [("SEGMENTS", 20_000), ("PREFIXES", 2_000), ("CROWD", 100)]:
        monkeypatch.setattr(placement, name, value)


def test_each_promise_of_placement_has_its_row_and_is_kept(tmp_path):
    rows = {row.what: row for row in placement_rows(tmp_path)}
    assert rows.keys() == {"pool.member.moved", "pool.lost.usable", "pool.crowd.reads"}
    assert all(row.ok for row in rows.values()), rows
    assert rows["pool.member.moved"].more.keys() >= {"of_4", "of_8", "of_16"}
    assert rows["pool.lost.usable"].value == pytest.approx(rows["pool.lost.usable"].more["ideal"],
                                                           abs=0.01)  # fmt: skip
    assert rows["pool.crowd.reads"].value >= 1
    assert 1 <= rows["pool.crowd.reads"].more["lookups"] <= 2


def test_a_placement_that_moves_too_much_misses_its_goal(monkeypatch):
    class Modulo(Placement):
        """Segments go by their number modulo the members: nearly all move with each member."""

        def order(self, name):
            members = sorted(self.members, key=lambda member: member.id)
            return [members[int.from_bytes(name) % len(members)]]

    monkeypatch.setattr(placement, "Placement", Modulo)
    assert placement._moved_row().ok is False
