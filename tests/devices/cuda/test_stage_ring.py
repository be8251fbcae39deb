from hypothesis import given
from hypothesis import strategies as st

from holdfast.devices.cuda.stage_ring import StageRing


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60))
def test_slots_in_use_are_not_taken_and_all_are_free_after_the_last_release(slots, steps):
    ring, used = StageRing(slots), {}
    for take, number in steps:
        if take:
            start = ring.take(number)
            if start is not None:
                taken = set(range(start, start + number))
                assert taken <= set(range(slots))
                assert not any(taken & others for others in used.values())
                used[start] = taken
            else:
                assert used or number > slots
        elif used:
            start = list(used)[number % len(used)]
            ring.release(start)
            del used[start]
        assert ring.used == sum(len(taken) for taken in used.values())
    for start in list(used):
        ring.release(start)
    assert ring.take(slots) == 0
