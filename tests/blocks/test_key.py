"""Keys: golden vectors, chaining, and that nothing but the same prefix has the same name."""

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.key import Chain, named_key, unpack_keys
from holdfast.errors import BlockError

DOMAIN_KEY = bytes(range(32))
FINGERPRINT = bytes(range(16))
tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain_of(tokens, size=4, **changes):
    arguments = {"domain_key": DOMAIN_KEY, "fingerprint": FINGERPRINT, "block_tokens": size}
    chain = Chain(**arguments | changes)
    chain.extend(tokens)
    return chain


def as_documented(tokens, size, extras, lookahead=0):
    """docs/reference/format.md, word for word, by plain code."""
    keys, parent = [], FINGERPRINT
    for i in range(max(0, len(tokens) - lookahead) // size):
        text = FINGERPRINT + parent + (size + lookahead).to_bytes(4, "little")
        for token in tokens[i * size : (i + 1) * size + lookahead]:
            text += token.to_bytes(4, "little")
        listed = extras.get(i, [])
        text += len(listed).to_bytes(4, "little")
        for extra in listed:
            text += len(extra).to_bytes(4, "little") + extra
        parent = hashlib.blake2b(text, key=DOMAIN_KEY, digest_size=16).digest()
        keys.append(parent)
    return keys


def test_keys_match_the_golden_vectors():
    chain = chain_of(range(1, 9), extras={1: [b"image", b""]})
    assert [key.hex() for key in chain.keys] == [
        "4f248ed904b307a4c1a8936fb3ca0e9f",
        "9676017afcdc95153be4036f7c75ac77",
    ]


@given(
    tokens_of,
    st.integers(1, 9),
    st.dictionaries(st.integers(0, 5), st.lists(st.binary(max_size=20), max_size=3)),
    st.integers(0, 3),
)
def test_keys_are_as_documented(tokens, size, extras, lookahead):
    keys = chain_of(tokens, size, extras=extras, lookahead=lookahead).keys
    assert keys == as_documented(tokens, size, extras, lookahead)


def test_a_block_with_a_lookahead_is_named_once_the_tokens_after_it_are_known():
    chain = chain_of([1, 2, 3, 4], lookahead=1)
    assert chain.keys == []
    chain.extend([1, 2, 3, 4, 5])
    other = chain_of([1, 2, 3, 4, 6], lookahead=1)
    assert len(chain.keys) == len(other.keys) == 1
    assert chain.keys != other.keys
    chain.extend([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert chain.keys == chain_of(range(1, 10), lookahead=1).keys


def test_a_negative_lookahead_is_refused():
    with pytest.raises(BlockError, match="lookahead is -1"):
        chain_of([], lookahead=-1)


@given(tokens_of, st.lists(st.integers(0, 40), max_size=5), st.integers(1, 9))
def test_a_chain_extended_in_steps_has_the_same_keys(tokens, stops, size):
    chain = chain_of([], size)
    for stop in sorted(stops):
        chain.extend(tokens[:stop])
    chain.extend(tokens)
    chain.extend(tokens[: len(tokens) // 2])
    assert chain.keys == chain_of(tokens, size).keys
    assert len(chain) == len(tokens) // size


@given(tokens_of)
def test_lists_and_arrays_of_the_same_tokens_give_the_same_keys(tokens):
    expected = chain_of(tokens).keys
    assert chain_of(np.array(tokens, dtype=np.int64)).keys == expected
    assert chain_of(np.array(tokens, dtype=np.uint32)).keys == expected
    assert chain_of(tuple(tokens)).keys == expected


@given(tokens_of.filter(lambda tokens: len(tokens) >= 4), st.data())
def test_one_changed_token_changes_the_keys_of_its_block_and_all_later_blocks(tokens, data):
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens[:at], (tokens[at] + 1) % 2**32, *tokens[at + 1 :]]
    one, other = chain_of(tokens).keys, chain_of(changed).keys
    assert one[: at // 4] == other[: at // 4]
    assert not set(one[at // 4 :]) & set(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"domain_key": bytes(32)},
        {"fingerprint": bytes(16)},
        {"extras": {0: [b""]}},
        {"extras": {0: [b"a", b"b"]}},
        {"extras": {0: [b"ab"]}},
    ],
)
def test_a_changed_domain_key_fingerprint_or_extra_changes_every_key(changes):
    plain = chain_of(range(12))
    assert not set(plain.keys) & set(chain_of(range(12), **changes).keys)


def test_extras_divided_differently_give_different_keys():
    names = {
        tuple(chain_of(range(8), extras=extras).keys)
        for extras in ({0: [b"ab"]}, {0: [b"a", b"b"]}, {0: [b"", b"ab"]}, {1: [b"ab"]}, {})
    }
    assert len(names) == 5


def test_parents_and_packed_keys_are_those_of_the_chain():
    chain = chain_of(range(12))
    assert chain.parent(0) == FINGERPRINT
    assert chain.parent(2) == chain.keys[1]
    assert unpack_keys(chain.packed()) == chain.keys
    assert unpack_keys(chain.packed(1, 2)) == chain.keys[1:2]
    assert unpack_keys(b"") == []


def test_a_segment_is_named_by_its_first_block():
    chain = chain_of(range(1_030), 1)
    assert {chain.segment(i) for i in range(512)} == {chain.keys[0][:8]}
    assert {chain.segment(i) for i in range(512, 1_024)} == {chain.keys[512][:8]}
    assert chain.segment(1_024) == chain.keys[1_024][:8]


@given(st.integers(1, 60), st.integers(1, 70))
def test_segments_have_the_requested_length(blocks, segment_blocks):
    chain = Chain(DOMAIN_KEY, FINGERPRINT, 1, segment_blocks=segment_blocks)
    chain.extend(range(blocks))
    heads = [index for index in range(blocks) if chain.segment(index) == chain.keys[index][:8]]
    assert heads == list(range(0, blocks, segment_blocks))


def test_chains_that_share_a_prefix_share_the_segments_that_begin_in_it():
    one, other = (Chain(DOMAIN_KEY, FINGERPRINT, 1, segment_blocks=4) for _ in range(2))
    one.extend(range(12))
    other.extend([*range(5), *range(100, 107)])
    assert [one.segment(i) == other.segment(i) for i in (0, 4, 8)] == [True, True, False]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"domain_key": bytes(31)}, "domain key has 31 bytes, not 32"),
        ({"fingerprint": bytes(17)}, "fingerprint has 17 bytes, not 16"),
        ({"block_tokens": 0}, "block_tokens is 0"),
    ],
)
def test_wrong_shapes_are_refused(changes, expected):
    with pytest.raises(BlockError, match=expected):
        chain_of([], **changes)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, -1],
        [1, 2, 3, 2**32],
        np.array([1, 2, 3, -1]),
        np.array([1, 2, 3, 2**32]),
        np.array([1.0, 2.0, 3.0, 4.0]),
        np.zeros((4, 4), dtype=np.int64),
        ["a", "b", "c", "d"],
    ],
)
def test_invalid_token_values_are_refused(tokens):
    with pytest.raises(BlockError, match="token"):
        chain_of(tokens)


class Wrapped(Sequence):
    """A sequence of one's own, as engines hand over."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


class Elsewhere:
    """Another library's array."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


MASKED = np.ma.masked_array([1, 2, 3, 4], mask=[False, True, False, False])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (bytes([1, 0, 0, 0] * 4), "of type bytes; pass a sequence of integers"),
        (bytearray([1, 0, 0, 0] * 4), "of type bytearray"),
        (memoryview(bytes(4)), "of type memoryview"),
        ("abcd", "of type str"),
        ("", "of type str"),
        (array("f", [1.0] * 4), "type code 'f'"),
        ([1.0, 2.0, 3.0, 4.0], "must be integers from 0"),
        ([1, 2, 3, 4.0], "must be integers from 0"),
        ((1, 2, 3, None), "must be integers from 0"),
        (np.array(5), "not 0-d int64"),
        (np.zeros((1, 4), dtype=np.int32), "not 2-d int32"),
        (np.array([True] * 4), "not 1-d bool"),
        ([True, False, True, True], "tokens are bools, as in a mask; pass a sequence of integers"),
        ((5, 6, 7, False), "tokens are bools"),
        (Wrapped([False] * 4), "tokens are bools"),
        (np.array([1, 2, 3, 4], dtype=object), "not 1-d object"),
        (np.array([1, 2, 3, -4], dtype=np.int8), "not from -4 to 3"),
        (np.array([1, 2, 3, 2**63], dtype=np.uint64), f"to {2**63}"),
        (MASKED, "tokens are a masked numpy array"),
        (np.ma.masked_array([1, 2, 3, 4]), "tokens are a masked numpy array"),
        (Elsewhere(MASKED), "tokens are a masked numpy array"),
        (list(MASKED), "must be integers from 0"),
        ({1, 2, 3, 4}, "of type set"),
        ({1: 0, 2: 0, 3: 0, 4: 0}, "of type dict"),
        (iter([1, 2, 3, 4]), "of type list_iterator"),
        (deque([1, 2, 3, 4, 5]), "of type deque|must be integers"),
        (None, "of type NoneType"),
        (7, "of type int"),
    ],
)
def test_tokens_of_a_wrong_type_are_refused_by_name(tokens, words):
    """An array of words takes bytes as raw memory: four of them would name one token."""
    with pytest.raises(BlockError, match=words):
        chain_of(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        (1, 2, 3, 4),
        range(1, 5),
        array("B", [1, 2, 3, 4]),
        array("q", [1, 2, 3, 4]),
        Wrapped([1, 2, 3, 4]),
        Elsewhere(np.array([1, 2, 3, 4])),
        [np.int64(1), np.uint8(2), 3, 4],
        *(np.array([1, 2, 3, 4], dtype=kind) for kind in ("i1", "u1", ">i2", "u4", "<i8", "u8")),
        np.array([1, 0, 2, 0, 3, 0, 4, 0])[::2],
    ],
)
def test_integers_in_every_kind_of_sequence_give_the_same_keys(tokens):
    assert chain_of(tokens).keys == chain_of([1, 2, 3, 4]).keys


def test_a_slice_of_bytes_is_not_read_as_words():
    with pytest.raises(BlockError, match="of type Wrapped"):
        chain_of(Wrapped(bytes([1, 0, 0, 0] * 4 + [1])))


def test_half_a_key_is_refused():
    with pytest.raises(BlockError, match="17 bytes"):
        unpack_keys(bytes(17))


def test_the_key_of_an_engines_name_matches_the_golden_vector():
    key = named_key(DOMAIN_KEY, FINGERPRINT, b"name of 16 bytes")
    assert key.hex() == "f27d77b288062efff4c273c431cbab23"


@pytest.mark.parametrize("length", [0, 8, 15, 257])
def test_a_name_that_may_collide_or_is_too_long_is_refused(length):
    with pytest.raises(BlockError, match=f"{length} bytes, not from 16 to 256"):
        named_key(DOMAIN_KEY, FINGERPRINT, bytes(length))
