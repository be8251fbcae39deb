"""Work slots: what waits, and what may start."""

from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.fairness.work_slots import WorkSlots


def test_a_prefetch_raised_to_demand_keeps_its_cost_and_share():
    slots = WorkSlots(usual=2, spare=0)
    later = WorkItem(b"d", 500.0, 2.0, Priority.PREFETCH)
    for name in ("for later", "wanted"):
        slots.put(later, name, 0.0)
    slots.raise_priority(b"d", lambda item: item == "wanted", 0.0)
    assert {slots.take(0.0), slots.take(0.0)} == {
        (later, "for later"),
        (later._replace(priority=Priority.DEMAND), "wanted"),
    }
