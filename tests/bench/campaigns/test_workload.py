"""What lies whole on an image is told from the bytes that were written."""

from holdfast.tiers.disk.region import SECTOR
from holdfast_bench.campaigns import workload


def test_whole_records_are_found_in_the_image_without_the_tier():
    life = workload.live(3)
    found = workload.whole(life.medium.image, life)
    laid, key = next(iter(found.items()))
    at = workload.GEOMETRY.regions_at + laid.place * SECTOR
    assert len(found) > 5
    assert workload.whole(life.start, life) == {}
    for offset in (at, at + 8, at + 100, at + 200):
        image = bytearray(life.medium.image)
        image[offset] ^= 1
        assert found.items() - workload.whole(image, life).items() == {(laid, key)}


def test_a_freed_record_is_not_expected_after_the_write_that_frees_it():
    life = next(life for life in map(workload.live, range(50)) if life.freed)
    laid, writes = next(iter(life.freed.items()))
    image = bytearray(life.start)
    for offset, data in life.medium.log[:writes]:
        image[offset : offset + len(data)] = data
    assert laid not in workload.whole(image, life, writes)
    others = workload.whole(image, life, writes).keys()
    assert workload.whole(image, life, writes - 1).keys() - others <= {laid}
