"""A batch is cut so that nothing is lost, lanes are about equal, and no message is too large."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.limits import MIB
from holdfast.wire.remote.batches import SPLIT_BYTES, parts_of_batch

SIZES = st.lists(st.integers(1, 3 * MIB), max_size=40)


@given(SIZES, st.integers(1, 4), st.integers(1, 12 * MIB))
def test_every_record_is_in_one_message_in_order(sizes, ways, message_bytes):
    batch_parts = parts_of_batch(sizes, ways, message_bytes)
    spans = [span for batch_part in batch_parts for span in batch_part]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(len(sizes)))
    assert len(batch_parts) <= ways
    for span in spans:
        assert span.stop == span.start + 1 or sum(sizes[span]) <= message_bytes


@given(SIZES, st.integers(1, 4))
def test_batch_parts_exceed_an_equal_share_by_two_records_at_most(sizes, ways):
    if sum(sizes) < SPLIT_BYTES:
        assert len(parts_of_batch(sizes, ways, 66 * MIB)) == min(1, len(sizes))
        return
    share, largest = sum(sizes) / ways, max(sizes)
    for batch_part in parts_of_batch(sizes, ways, 66 * MIB):
        assert sum(sum(sizes[span]) for span in batch_part) <= share + 2 * largest


def test_a_small_batch_is_one_message_and_an_empty_batch_is_none():
    assert parts_of_batch([MIB] * 3, 2, 66 * MIB) == [[slice(0, 3)]]
    assert len(parts_of_batch([MIB] * 8, 2, 66 * MIB)) == 2
    assert parts_of_batch([], 2, 66 * MIB) == []
