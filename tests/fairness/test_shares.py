"""Who gives way: never from what is reserved, first whoever is furthest above its share."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.fairness.shares import Quota, part_left, victim_domains

A, B, C = b"a", b"b", b"c"


def test_a_lone_domain_is_its_own_victim() -> None:
    assert victim_domains({A: 100}, {}, A, 10) == [A]
    assert victim_domains({}, {}, A, 10) == []


def test_a_flooding_domain_is_its_own_first_victim() -> None:
    assert victim_domains({A: 900, B: 100}, {}, A, 10) == [A]
    assert victim_domains({A: 900, B: 100}, {}, B, 10) == [A, B]


def test_a_domain_within_its_reservation_is_never_a_victim() -> None:
    quotas = {B: Quota(reserved_bytes=500)}
    assert victim_domains({A: 100, B: 500}, quotas, A, 10) == [A]
    assert victim_domains({B: 500}, quotas, A, 10) == []
    assert victim_domains({A: 10, B: 600}, quotas, A, 10) == [B, A]


def test_a_domain_at_its_quota_is_its_own_only_victim() -> None:
    quotas = {A: Quota(most_bytes=100)}
    assert victim_domains({A: 100, B: 900}, quotas, A, 10) == [A]
    assert victim_domains({B: 900}, {A: Quota(most_bytes=5)}, A, 10) == []


def test_a_larger_share_may_hold_more() -> None:
    quotas = {A: Quota(share=4.0)}
    assert victim_domains({A: 390, B: 110}, quotas, A, 10) == [B, A]
    assert victim_domains({A: 450, B: 50}, quotas, B, 10) == [A, B]


def test_a_domain_without_memory_takes_it_from_the_largest_holder() -> None:
    assert victim_domains({A: 10, B: 20}, {}, C, 50) == [B, A]


HELD = st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 1_000))
QUOTAS = st.dictionaries(
    st.sampled_from([A, B, C]),
    st.builds(Quota, st.integers(0, 500), st.integers(0, 2_000), st.floats(0.1, 10)),
)


@given(HELD, QUOTAS, st.integers(1, 100))
def test_no_domain_loses_reserved_memory_or_exceeds_its_quota(used, quotas, nbytes) -> None:
    order = victim_domains(used, quotas, A, nbytes)
    assert len(set(order)) == len(order)
    for domain in order:
        assert used[domain]
        if domain != A:
            assert used[domain] > quotas.get(domain, Quota()).reserved_bytes
    if used.get(A, 0) + nbytes > quotas.get(A, Quota()).most_bytes:
        assert order in ([], [A])


def test_domains_that_take_all_they_may_leave_a_part_for_each_further_one() -> None:
    assert part_left(120, own=0, others=0) == 60
    assert part_left(120, own=60, others=0) == 0
    assert part_left(120, own=0, others=60) == 30
    assert part_left(120, own=40, others=40) == 0, "two with a third each are at rest"
    assert part_left(120, own=60, others=30) < 0


@given(st.integers(0, 10_000), st.lists(st.integers(0, 5_000), max_size=20))
def test_what_domains_have_of_a_shared_resource_stays_within_it(most, asked) -> None:
    taken = 0
    for wanted in asked:
        taken += min(wanted, part_left(most, 0, taken))
    assert 0 <= taken <= most
