"""One order a domain: found at once, never mixed, and each as if it were alone."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.policy.choice import POLICIES
from holdfast.policy.leaf import LeafLru
from holdfast.policy.per_domain import PerDomainEviction
from holdfast.testing.policy_contract import EvictionContract, EvictionMachine


def one_domain(row: int) -> bytes:
    return b"one"


class ApartMachine(EvictionMachine):
    """With one domain it keeps every promise of the policy inside."""

    def make(self) -> PerDomainEviction:
        return PerDomainEviction(POLICIES["cost_aware"], one_domain, [b"one"])


TestApartMachine = ApartMachine.TestCase
TestApartMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class TestApart(EvictionContract):
    def make(self) -> PerDomainEviction:
        return PerDomainEviction(LeafLru, one_domain, [b"one"])


def test_the_victims_of_a_domain_are_its_own_blocks() -> None:
    apart = PerDomainEviction(LeafLru, lambda row: bytes([row % 3]), [])
    for row in range(300):
        apart.insert([row], [-1], [row], float(row))
    assert list(apart.victims_of(bytes([1]), 300.0)) == list(range(1, 300, 3))
    assert list(apart.victims_of(b"nobody", 300.0)) == []
    assert sorted(apart.victims(300.0)) == list(range(300))


def test_an_unconfigured_domain_is_removed_with_its_last_block() -> None:
    apart = PerDomainEviction(LeafLru, lambda row: bytes([row]), [bytes([0])])
    for row in range(3):
        apart.insert([row], [-1], [row], 0.0)
        apart.remove(row)
        assert bytes([row]) in apart._orders, "it may come back until it is forgotten"
        apart.forget(row)
    assert list(apart._orders) == [bytes([0])]
    apart.insert([2], [-1], [2], 1.0)
    assert list(apart.victims(2.0)) == [2]


OPS = st.lists(st.tuples(st.sampled_from("iitrf"), st.integers(0, 11)), max_size=60)


@given(OPS)
@example([("i", 8), ("f", 7), ("i", 6)])  # row 6 gets the freed number of row 7, the parent of 8
def test_each_domain_is_ordered_as_if_it_were_alone(ops: list[tuple[str, int]]) -> None:
    """Rows 0 to 5 are one domain's, 6 to 11 another's; what one does changes nothing there."""
    apart = PerDomainEviction(LeafLru, lambda row: bytes([row // 6]), [])
    alone = [LeafLru(), LeafLru()]
    for op, row in ops:
        for policy in (apart, alone[row // 6]):
            match op:
                case "i":
                    policy.insert([row], [row - 1 if row % 6 else -1], [row], 0.0)
                case "t":
                    policy.touch([row], 0.0)
                case "r":
                    policy.remove(row)
                case "f":
                    policy.remove(row)
                    policy.forget(row)
    for domain, policy in enumerate(alone):
        assert list(apart.victims_of(bytes([domain]), 0.0)) == list(policy.victims(0.0))


def test_the_number_of_a_forgotten_row_is_reused() -> None:
    apart = PerDomainEviction(LeafLru, one_domain, [b"one"])
    for row in range(1_000):
        apart.insert([row], [-1], [row], 0.0)
        apart.remove(row)
        apart.forget(row)
    assert len(apart._orders[b"one"].rows) == 1


def test_block_values_are_requested_by_the_row_numbers_of_the_index() -> None:
    apart = PerDomainEviction(POLICIES["cost_aware"], lambda row: bytes([row % 2]), [])
    asked: list[int] = []

    def worth(row: int) -> float:
        asked.append(row)
        return 1.0

    apart.insert([0], [-1], [0], 0.0)
    apart.weigh_by(worth)
    for row in (7, 9, 4):
        apart.insert([row], [-1], [row], 0.0)
    assert {7, 9, 4} <= set(asked)
