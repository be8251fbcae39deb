"""Names of pages that other engines know."""

import pytest

from holdfast.blocks.key import Chain
from holdfast.engines.sglang import page_names
from holdfast.engines.sglang.page_names import PageNames
from holdfast.errors import BlockError

PAGE = 4


def begin():
    return Chain(bytes(32), bytes(16), PAGE)


def named(names, tokens, prior=None):
    return names.name(lambda *_: ["theirs"], tokens, prior, PAGE)


def test_names_are_the_keys_of_the_tokens_however_they_are_asked_for():
    names, chain, tokens = PageNames(begin), begin(), [*range(12)]
    chain.extend(tokens)
    whole = named(names, tokens)
    assert whole == [key.hex() for key in chain.keys]
    assert named(names, tokens[4:], whole[0]) == whole[1:]


def test_a_chain_that_grows_by_what_follows_has_the_same_keys():
    whole, parts = begin(), begin()
    whole.extend([*range(13)])
    parts.append([0, 1, 2, 3])
    parts.append([4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert parts.keys == whole.keys


def test_a_context_is_known_from_its_beginning():
    names = PageNames(begin)
    whole = named(names, [*range(20)])
    assert [key.hex() for key in names.context(whole[3:]).keys] == whole


def test_contexts_that_are_used_are_not_forgotten(monkeypatch):
    monkeypatch.setattr(page_names, "NAMES_MAX", 6)
    names = PageNames(begin)
    kept, lost = named(names, [*range(8)]), named(names, [*range(100, 108)])
    for other in range(4):
        names.context(kept)
        named(names, [*range(1000 + 4 * other, 1004 + 4 * other)])
    assert len(names.context(kept)) == 2
    with pytest.raises(BlockError, match="do not follow each other"):
        names.context(lost)
