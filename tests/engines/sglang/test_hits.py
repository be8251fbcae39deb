"""The prefixes that SGLang can restore, against a plain twin."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.engines.sglang.hits import (
    ALL_PAGES,
    BLOCK_GROUPS,
    TRAILING_PAGES,
    PoolHits,
    leading,
    restorable,
)

HELD = st.lists(st.booleans(), min_size=8, max_size=8)
POOLS = st.dictionaries(
    st.sampled_from(["swa", "mamba", "indexer"]),
    st.builds(PoolHits, st.sampled_from([ALL_PAGES, TRAILING_PAGES]), HELD, st.integers(1, 9)),
)


def fits(pool, length):
    """Whether a pool has what a prefix of this many pages needs, said plainly."""
    first = 0 if pool.policy == ALL_PAGES else max(0, length - pool.trailing)
    return all(pool.held[first:length])


@given(kv=HELD, pools=POOLS)
def test_a_prefix_is_restorable_if_every_pool_has_what_it_needs(kv, pools):
    pages = leading(kv)
    found = restorable("kv", pages, pools)
    expected = [
        length
        for length in range(1, pages + 1)
        if all(fits(pool, length) for pool in pools.values())
    ]
    assert found.lengths == expected
    assert found.pages == max(expected, default=0)
    for name, pool in pools.items():
        alone = [length for length in range(1, pages + 1) if fits(pool, length)]
        assert found.by_pool.get(name, 0) == max(alone, default=0)
    assert found.by_pool.get("kv", 0) == pages


def test_a_second_form_of_the_pages_limits_no_prefix():
    groups = PoolHits(BLOCK_GROUPS, [False] * 4)
    assert restorable("kv", 4, {"draft": groups}).lengths == [1, 2, 3, 4]


def test_a_pool_with_an_unknown_policy_restores_nothing():
    other = PoolHits("every_other_page", [True] * 4)
    assert restorable("kv", 4, {"new": other}).pages == 0
