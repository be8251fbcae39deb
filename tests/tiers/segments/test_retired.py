"""Retired segments are remembered until their age class ends, and no longer."""

from holdfast.tiers.segments.format import SegmentName
from holdfast.tiers.segments.retired import RetiredSegments

DAY_S = 86_400.0


def path(created_s, age_class="7d", number=0):
    return SegmentName(age_class, "0" * 16, f"{int(created_s * 1000) << 16 | number:016x}").path


def test_a_retired_segment_is_known_until_its_age_class_ends():
    retired = RetiredSegments()
    retired.add([path(1e9), path(1e9, "30d")], 1e9)
    for day in range(1, 29):
        paths = [path(1e9 + day * DAY_S, "1d", number) for number in range(2_000)]
        retired.add(paths, 1e9 + day * DAY_S)
        assert (path(1e9) in retired) or day >= 7
        assert path(1e9, "30d") in retired
        assert all(each in retired for each in paths)
        assert len(retired) < 10_000


def test_a_path_that_is_no_segment_is_ignored():
    retired = RetiredSegments()
    retired.add(["7d/00/else", ""], 1e9)
    assert "7d/00/else" not in retired
