"""The index finds the longest held prefix and stays small."""

import hashlib

from holdfast.blocks.namespace import Namespace
from holdfast.index.residency import Residency

NAMESPACE = Namespace(b"f" * 16, b"d" * 16, 4096, 128)
OTHER = NAMESPACE._replace(fingerprint=b"g" * 16)


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little", signed=True), digest_size=16).digest()


def hold(index: Residency, numbers: range, tier: int = 0) -> list[int]:
    rows = []
    for number in numbers:
        row = index.add(NAMESPACE, key(number), key(number - 1), number)
        index.places[tier][row] = number
        rows.append(row)
    return rows


def test_coverage_ends_at_the_first_missing_block() -> None:
    index = Residency(2)
    hold(index, range(3))
    hold(index, range(4, 6))
    coverage = index.cover(NAMESPACE, [key(i) for i in range(6)])
    assert coverage.blocks == 3


def test_coverage_names_the_fastest_tier_of_each_block() -> None:
    index = Residency(3)
    hold(index, range(4), tier=2)
    hold(index, range(2), tier=1)
    hold(index, range(1), tier=0)
    assert index.cover(NAMESPACE, [key(i) for i in range(4)]).tiers == [0, 1, 2, 2]


def test_a_block_without_a_place_is_not_covered() -> None:
    index = Residency(1)
    rows = hold(index, range(2))
    index.places[0][rows[0]] = -1
    assert index.cover(NAMESPACE, [key(0), key(1)]).blocks == 0


def test_no_hit_crosses_namespaces_even_under_one_key() -> None:
    index = Residency(1)
    hold(index, range(2))
    assert index.cover(OTHER, [key(0)]).blocks == 0
    index.add(OTHER, key(9), key(8), 0)
    assert index.cover(OTHER, [key(0)]).blocks == 0
    assert index.find(OTHER, key(0)) == -1
    assert index.find_all(OTHER, [key(0), key(1)]) == [-1, -1]
    assert index.held(OTHER, [key(0)]) == b"\0"


def test_the_same_key_in_two_namespaces_is_two_blocks() -> None:
    index = Residency(1)
    mine = hold(index, range(3))
    theirs = [index.add(OTHER, key(n), key(n - 1), n) for n in range(3)]
    assert set(mine).isdisjoint(theirs)
    assert len(index) == 6
    assert index.parent_rows([*mine, *theirs]) == [-1, *mine[:2], -1, *theirs[:2]]
    for row in theirs[:2]:
        index.places[0][row] = 100 + row
    assert index.cover(OTHER, [key(n) for n in range(3)]).rows == theirs[:2]
    assert index.cover(NAMESPACE, [key(n) for n in range(3)]).rows == mine
    index.drop(mine[0])
    assert index.find(NAMESPACE, key(0)) == -1
    assert index.find(OTHER, key(0)) == theirs[0]
    assert sorted(index.rows()) == sorted([*mine[1:], *theirs])


def test_the_name_of_a_block_is_stable_and_unique_to_its_namespace() -> None:
    index = Residency(1)
    (row,) = hold(index, range(1))
    other = index.add(OTHER, key(0), b"", 0)
    mine, theirs = index.names([row, other])
    assert mine != theirs
    assert mine[-16:] == theirs[-16:] == key(0)
    index.drop(row)
    index.add(OTHER, key(7), b"", 0)
    assert index.names(hold(index, range(1))) == [mine]


def test_a_dropped_row_is_reused_and_found_under_its_new_key_only() -> None:
    index = Residency(1)
    (row,) = hold(index, range(1))
    index.places[0][row] = -1
    index.drop(row)
    assert index.find(NAMESPACE, key(0)) == -1
    assert index.add(NAMESPACE, key(5), key(4), 5) == row
    assert index.cover(NAMESPACE, [key(0)]).blocks == 0
    assert len(index) == 1


def chain_of(numbers: range) -> tuple[list[bytes], list[bytes], list[int]]:
    return [key(n) for n in numbers], [key(n - 1) for n in numbers], list(numbers)


def test_adding_a_chain_at_once_equals_adding_its_blocks_one_by_one() -> None:
    apart, together = Residency(2), Residency(2)
    for index in (apart, together):
        index.add(NAMESPACE, key(3), key(2), 3)  # is known already, out of its turn
        index.drop(index.add(NAMESPACE, key(9), key(8), 9))
    one_by_one = [apart.add(NAMESPACE, key(n), key(n - 1), n) for n in range(1, 6)]
    assert together.extend(NAMESPACE, *chain_of(range(1, 6))) == one_by_one
    assert together.keys == apart.keys
    assert together.parents == apart.parents
    assert together.depths == apart.depths
    assert together.extend(NAMESPACE, [], [], []) == []


def test_adding_new_blocks_at_once_equals_adding_them_one_by_one() -> None:
    apart, together = Residency(2), Residency(2)
    one_by_one = [*hold(apart, range(4)), apart.add(NAMESPACE, key(7), key(1), 2)]
    keys, parents, depths = chain_of(range(4))
    rows = together.extend(NAMESPACE, [*keys, key(7)], [*parents, key(1)], [*depths, 2])
    assert rows == one_by_one
    assert together.cover(NAMESPACE, keys).blocks == 0
    for row in rows:
        together.places[0][row] = apart.places[0][row] = row
    assert together.cover(NAMESPACE, keys) == apart.cover(NAMESPACE, keys)
    assert together.parent_rows(rows) == apart.parent_rows(rows) == [-1, 0, 1, 2, 1]
    assert (together.keys, together.parents) == (apart.keys, apart.parents)
    assert (together.depths, together.leases) == (apart.depths, apart.leases)
    assert together.places[1] == apart.places[1]
    for row in reversed(rows):
        together.places[0][row] = -1
        together.drop(row)
    assert together.namespaces_named == 1
    assert len(together) == 0


def test_the_parent_row_is_found_by_key() -> None:
    index = Residency(1)
    rows = hold(index, range(3))
    assert index.parent_rows(rows) == [-1, rows[0], rows[1]]


def test_more_than_65536_namespaces_are_distinguished() -> None:
    index, many = Residency(1), 70_000
    namespaces = [NAMESPACE._replace(domain=number.to_bytes(16, "big")) for number in range(many)]
    rows = [index.add(namespace, key(n), b"", 0) for n, namespace in enumerate(namespaces)]
    assert all(
        index.namespace(row) == namespace for row, namespace in zip(rows, namespaces, strict=True)
    )


def test_a_namespace_without_blocks_is_removed_from_the_index() -> None:
    index = Residency(1)
    (kept,) = hold(index, range(1))
    for number in range(1, 1_000):
        namespace = NAMESPACE._replace(domain=number.to_bytes(16, "big"))
        row = index.add(namespace, key(number), b"", 0)
        assert index.namespace(row) == namespace
        index.places[0][row] = number
        assert index.cover(namespace, [key(number)]).blocks == 1
        index.places[0][row] = -1
        index.drop(row)
        assert index.cover(namespace, [key(number)]).blocks == 0
    assert len(index.namespaces) == 2
    assert index.namespace(kept) == NAMESPACE
    assert index.cover(NAMESPACE, [key(0)]).blocks == 1


def test_a_block_whose_named_parent_is_later_in_the_chain_has_no_parent() -> None:
    index = Residency(1)
    rows = [index.add(NAMESPACE, key(n), key((n + 1) % 3), n) for n in range(3)]
    itself = index.add(NAMESPACE, key(9), key(9), 0)
    assert index.parent_rows([*rows, itself]) == [-1, -1, rows[0], -1]


def test_a_block_is_never_the_parent_of_a_block_in_another_namespace() -> None:
    index = Residency(1)
    (theirs,) = hold(index, range(1))
    other = NAMESPACE._replace(domain=b"o" * 16)
    ours = [index.add(other, key(n), key(n - 1), n) for n in (1, 2)]
    assert index.parent_rows([theirs, *ours]) == [-1, -1, ours[0]]
