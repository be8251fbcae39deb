"""The medium in memory: what it records, and what a power cut leaves of that."""

import random

import pytest

from holdfast.testing.extents import ExtentWrite, MemoryExtents, crash_image

ONES, TWOS = b"\1" * 4096, b"\2" * 4096


def sectors_of(image):
    return [bytes(image[at : at + 512]) for at in range(0, len(image), 512)]


def test_writes_are_kept_in_order():
    medium = MemoryExtents(bytes(8192))
    medium.write(0, [memoryview(ONES)])
    medium.flush()
    medium.write(4096, [memoryview(ONES[:512]), memoryview(TWOS[:512])])
    assert medium.log == [
        ExtentWrite(0, ONES),
        ExtentWrite(0, b""),
        ExtentWrite(4096, ONES[:512] + TWOS[:512]),
    ]
    into = bytearray(1024)
    medium.read(4096, [memoryview(into)])
    assert into == ONES[:512] + TWOS[:512]


def test_memory_extents_fail_on_demand_and_past_their_end():
    medium = MemoryExtents(bytes(8192))
    medium.fails = lambda what, offset, nbytes: what == "read" and offset == 4096
    medium.read(0, [memoryview(bytearray(4096))])
    with pytest.raises(OSError, match="injected"):
        medium.read(4096, [memoryview(bytearray(4096))])
    with pytest.raises(OSError, match="past the end"):
        medium.write(8192, [memoryview(ONES)])


def test_a_crash_image_has_all_flushed_writes_and_any_part_of_later_ones():
    log = [ExtentWrite(0, ONES), ExtentWrite(0, b""), ExtentWrite(0, TWOS), ExtentWrite(4096, TWOS)]
    chosen = random.Random(0)
    images = [crash_image(bytes(8192), log, chosen) for _ in range(300)]
    after_the_flush = [image for image in images if TWOS[:512] in sectors_of(image)]
    assert after_the_flush
    assert all(image[at] for image in after_the_flush for at in range(0, 4096, 512))
    torn = [i for i in images if {ONES[:512], TWOS[:512]} <= set(sectors_of(i[:4096]))]
    late_only = [i for i in images if TWOS[:512] not in sectors_of(i[:4096]) and any(i[4096:])]
    assert torn
    assert late_only
    assert any(not any(image) for image in images)
