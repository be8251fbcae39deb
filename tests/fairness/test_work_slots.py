"""Work slots: what waits, and what may start."""

from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.fairness.work_slots import SEEN_S, WorkSlots


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


class CountedDomain(bytes):
    """A domain that counts how often any of its kind is looked up in a table."""

    lookups = 0

    def __hash__(self):
        CountedDomain.lookups += 1
        return super().__hash__()


def test_work_of_a_new_domain_costs_the_same_however_many_domains_were_seen():
    slots, domains = WorkSlots(usual=2, spare=2), 4_000
    for number in range(domains):
        slots.charge(WorkItem(CountedDomain(number.to_bytes(16))), number / domains)
    assert CountedDomain.lookups < 40 * domains
    assert slots.shared(b"another", 1.0)


def test_a_domain_is_alone_if_no_other_one_had_work_for_a_while():
    slots = WorkSlots(usual=2, spare=2)
    for second, domain in enumerate((b"a", b"b", b"c", b"c", b"b")):
        slots.charge(WorkItem(domain), float(second))
    assert slots.shared(b"b", 3.0 + SEEN_S - 0.1)
    assert not slots.shared(b"b", 3.0 + SEEN_S)
    assert slots.shared(b"c", 4.0 + SEEN_S - 0.1)
    assert not slots.shared(b"a", 4.0 + SEEN_S)
