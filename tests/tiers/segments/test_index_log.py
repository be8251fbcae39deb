"""Index objects are merged into objects that a reader can read, and lose nothing."""

import pytest

from holdfast.errors import Outcome
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.segments.format import (
    INDEX_BYTES_MAX,
    IndexedSegment,
    IndexObject,
    parse_index_name,
    read_index,
)
from holdfast.tiers.segments.index_log import MERGE_COUNT, IndexPublisher, read_index_object
from holdfast.tiers.segments.writer import SegmentWriter
from holdfast.wire.remote.stream import Deadline

BLOCKS = 1 << 13
"""Blocks of a segment: its entry in an index object has 160 KiB."""


def within():
    return Deadline.within(60.0)


@pytest.fixture
def objects():
    return MemoryObjects()


@pytest.fixture
def writer():
    return SegmentWriter("30d")


@pytest.fixture
def publisher(objects, writer):
    return IndexPublisher(MemoryMedium(objects), writer)


def publish(publisher, writer, segments=1, blocks=1):
    """Publish an object that lists new segments; return their paths."""
    paths = [writer.new_segment().path for _ in range(segments)]
    listed = [
        IndexedSegment(path, bytes(16), bytes(16 * blocks), b"\1\0\0\0" * blocks) for path in paths
    ]
    assert publisher.publish(IndexObject(listed), within()).outcome is Outcome.OK
    return paths


def merge(publisher, objects):
    """Merge once, and delete what was replaced; return the names of that."""
    replaced = publisher.merge(lambda content: content, within())
    for name in replaced:
        del objects.objects[name.path]
    return [name.path for name in replaced]


def listed_paths(objects):
    """Paths of segments that a reader learns of from all objects, with repetitions."""
    found = []
    for path in list(objects.objects):
        answer, content = read_index_object(MemoryMedium(objects), parse_index_name(path), within())
        assert answer.outcome is Outcome.OK
        assert content is not None, "a reader cannot read it"
        found += [segment.path for segment in content.segments]
    return sorted(found)


def test_objects_that_together_are_too_long_for_a_reader_become_several(publisher, writer, objects):
    paths = []
    for _ in range(MERGE_COUNT):
        paths += publish(publisher, writer, segments=14, blocks=BLOCKS)
    assert sum(map(len, objects.objects.values())) > INDEX_BYTES_MAX
    assert merge(publisher, objects)
    assert 1 < len(objects.objects) < MERGE_COUNT
    assert max(map(len, objects.objects.values())) <= INDEX_BYTES_MAX
    assert listed_paths(objects) == sorted(paths)


def test_a_damaged_object_is_neither_merged_nor_replaced(publisher, writer, objects, caplog):
    publish(publisher, writer)
    [damaged] = objects.objects
    paths = []
    for _ in range(MERGE_COUNT):
        paths += publish(publisher, writer)
    objects.objects[damaged] = bad = objects.objects[damaged][:-1] + b"?"
    assert damaged not in merge(publisher, objects)
    assert objects.objects.pop(damaged) == bad
    assert f"{damaged} is damaged" in caplog.text
    assert listed_paths(objects) == sorted(paths)
    [merged] = objects.objects.values()
    assert len(read_index(merged).replaces) == MERGE_COUNT


def test_an_object_that_has_left_the_medium_is_not_among_those_replaced(publisher, writer, objects):
    for _ in range(MERGE_COUNT):
        publish(publisher, writer)
    absent = min(objects.objects)
    del objects.objects[absent]
    assert absent not in merge(publisher, objects)
    assert len(objects.objects) == 1


def test_a_writer_forgets_the_objects_that_were_deleted(publisher, writer):
    for _ in range(MERGE_COUNT):
        publish(publisher, writer)
    replaced = publisher.merge(lambda content: content, within())
    assert all(map(publisher.is_own, replaced))
    [merged] = publisher.current()
    publisher.forget(replaced)
    assert not any(map(publisher.is_own, replaced))
    assert publisher.is_own(merged)
    publisher.forget([merged])
    assert publisher.current() == set()
