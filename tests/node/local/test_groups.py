"""A session with several KV groups: one lookup for all, blocks of each by its number."""

import contextlib

import pytest

from holdfast.blocks.key import Chain
from holdfast.codec.pack import payload
from holdfast.errors import ProtocolError, RefusedError
from holdfast.limits import GROUPS_MAX
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

PAYLOADS = {"full": 8 << 10, "window": 4 << 10, "recurrent": 2 << 10}
TOKENS, BLOCKS = 16, 8
WINDOW = m.GroupHello(b"w" * 16, PAYLOADS["window"], TOKENS, "window", 20)
STATE = m.GroupHello(b"s" * 16, PAYLOADS["recurrent"], TOKENS, "recurrent")


class Groups:
    """An engine whose model has three KV groups, the number of each as in its hello."""

    def __init__(self, address, more=(WINDOW, STATE), **first):
        fields = {"fingerprint": b"f" * 16, "raw_bytes": PAYLOADS["full"], "block_tokens": TOKENS}
        hello = m.Hello(m.PROTOCOL, "test engine", **(fields | first), more_groups=[*more])
        self.client = Client(address, hello, 60)
        fingerprints = [hello.fingerprint, *(group.fingerprint for group in more)]
        self.sizes = [hello.raw_bytes, *(group.raw_bytes for group in more)]
        self.chains = [
            Chain(self.client.welcome.domain_key, fingerprint, TOKENS)
            for fingerprint in fingerprints
        ]
        for chain in self.chains:
            chain.extend(range(BLOCKS * TOKENS))

    def save(self, group, blocks):
        for block in blocks:
            chain = self.chains[group]
            key = chain.packed(block, block + 1)
            reserve = m.Reserve(key, chain.parent(block), block, chain.segment(block), group)
            reserved = self.client.call(reserve, m.Reserved, 60)
            content = bytes([group, block]) * (self.sizes[group] // 2)
            payload(self.client.arena.view[reserved.places[0] :], self.sizes[group])[:] = content
            committed = self.client.call(m.Commit(reserved.ticket), m.Committed, 60)
            assert committed.blocks == 1

    def cover(self, tokens=BLOCKS * TOKENS + 1, **other):
        keys, *more = (chain.packed() for chain in self.chains)
        return self.client.call(m.Cover(keys, tokens, more_keys=more, **other), m.Covered, 60)

    def read(self, group, block):
        key = self.chains[group].packed(block, block + 1)
        fetched = self.client.call(m.Fetch(key, 5.0, group=group), m.Fetched, 60)
        found = bytes(payload(self.client.arena.view[fetched.places[0] :], self.sizes[group])[:2])
        assert self.client.call(m.Release(fetched.lease), m.Released, 60).valid
        return found

    def close(self):
        self.client.close()


@pytest.fixture
def groups(node_here):
    node = node_here()
    with contextlib.ExitStack() as stack:
        yield lambda **given: stack.enter_context(contextlib.closing(Groups(node.address, **given)))


def test_a_lookup_answers_with_the_longest_resume_of_all_groups(groups):
    engine = groups()
    engine.save(0, range(BLOCKS))
    assert engine.cover().blocks == 0
    engine.save(1, range(3, 6))
    engine.save(2, [4])
    covered = engine.cover()
    assert (covered.blocks, covered.worth) == (5, 5)
    assert covered.sources == {"host": 5}
    assert groups().cover().blocks == 5  # of another session, too


def test_blocks_of_each_group_come_back_by_its_number(groups):
    engine = groups()
    for group in range(3):
        engine.save(group, [2])
    assert [engine.read(group, 2) for group in range(3)] == [b"\0\2", b"\1\2", b"\2\2"]


def test_a_model_with_windows_only_needs_its_last_blocks(groups):
    first = {"attention": "window", "window": 20}
    engine = groups(more=(), **first)
    engine.save(0, [4, 5])
    assert engine.cover().blocks == 6
    assert engine.cover(tokens=6 * TOKENS).blocks == 0  # the last token is computed


def test_groups_that_differ_in_window_are_different_contexts(groups):
    engine = groups()
    for group in range(3):
        engine.save(group, range(BLOCKS))
    other = m.GroupHello(b"x" * 16, PAYLOADS["window"], TOKENS, "window", 24)
    assert groups(more=(other, STATE)).cover().blocks == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ((WINDOW, WINDOW), "two groups have one fingerprint"),
        ((m.GroupHello(b"w" * 16, 64, TOKENS, "window"),), r"kv_group.window is 0; for window"),
        ((m.GroupHello(b"w" * 16, 64, TOKENS, "strided"),), r"kv_group.attention is 'strided'"),
        ((m.GroupHello(b"w", 64, TOKENS),), r"hello.more_groups\[0\].fingerprint"),
        ((WINDOW, m.GroupHello(b"x" * 16, 64, -1)), r"hello.more_groups\[1\].block_tokens"),
        ((m.GroupHello(b"w" * 16, 32 << 20, TOKENS),), "raise tiers.0.capacity"),
    ],
)
def test_groups_that_are_out_of_bounds_are_refused_by_name(groups, more, named):
    with pytest.raises((RefusedError, ProtocolError), match=named):
        groups(more=more)


def test_too_many_groups_are_refused(groups):
    many = [m.GroupHello(bytes([n]) * 16, 64, TOKENS) for n in range(GROUPS_MAX + 1)]
    with pytest.raises(Exception, match=f"{GROUPS_MAX}|ended|closed|broke"):
        groups(more=many)


def test_a_lookup_without_a_chain_for_each_group_is_refused(groups):
    engine = groups()
    with pytest.raises(RefusedError, match="chains of 1 KV groups, the session has named 3"):
        engine.client.call(m.Cover(engine.chains[0].packed()), m.Covered, 60)


def test_a_group_that_was_not_named_is_refused(groups):
    engine = groups()
    key = engine.chains[0].packed(0, 1)
    for request in (m.Fetch(key, 1.0, group=3), m.Reserve(key, b"f" * 16, 0, group=-1)):
        with pytest.raises(RefusedError, match=r"group -?\d requested; the session has named 3"):
            engine.client.call(request, m.Reserved, 60)
