"""`holdfast bench files` moves the same bytes on both sides, on a folder of this machine."""

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.measure import files


def test_each_row_has_a_plain_side_of_the_same_run(tmp_path):
    rows = list(files.files_rows(tmp_path, rounds=1, segments=1))
    names = [(row.what, row.more["threads"], row.goal) for row in rows]
    assert names == [
        ("files.write.x1", 1, 0.9),
        ("files.write.x4", 4, 0.9),
        ("files.read.x1", 1, 0.9),
        ("files.read.x4", 4, 0.9),
        ("files.read.x4.cached", 4, None),
    ]
    assert all(row.value and row.limit and row.ratio for row in rows)
    written = [path.stat().st_size for path in tmp_path.rglob("0")]
    assert written == [files.SEGMENT_BYTES] * 2


def test_a_segment_that_was_not_written_ends_the_measurement(tmp_path):
    (tmp_path / "tier").touch()
    with pytest.raises(HoldfastError, match="a segment was not written: gone"):
        list(files.files_rows(tmp_path, rounds=1, segments=1))


def test_records_through_a_tier_are_verified(tmp_path):
    rows = list(files.tier_rows(tmp_path, rounds=1, segments=1))
    assert [row.what for row in rows] == ["files.tier.write", "files.tier.read"]
    assert all(row.value and row.limit and row.goal for row in rows)
