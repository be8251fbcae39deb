"""A batch of named blocks is read in as few calls as what is held allows."""

import hashlib

import pytest

from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.key import named_key
from holdfast.blocks.layout import OpaqueLayout
from holdfast.errors import Outcome
from holdfast.named_blocks import FoundBlocks, LoadedRun, NamedSession

NBYTES = 4_096
NAMED = Fingerprint(
    Meaning(
        model="m",
        positions="none",
        adapter="none",
        kv_quantisation="none",
        kv_scales="none",
        naming="engine sha256",
        block_tokens=16,
        kv_group=KvGroup.all_layers(1),
    ),
    OpaqueLayout(
        dtype="float16",
        block_tokens=16,
        layers=1,
        nbytes=NBYTES,
        arrangement="rows",
        engine="engine",
        engine_version="1",
    ),
)
NAMES = [hashlib.sha256(bytes([number])).digest() for number in range(6)]
MEMORY = [[(number * NBYTES, NBYTES)] for number in range(6)]
OK, MISS, CORRUPT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT


class OtherStore:
    """A store that holds all blocks but some; it drops a damaged one when it is read."""

    domain_key = bytes(16)

    def __init__(self, missing=(), damaged=()):
        key_of = [named_key(self.domain_key, NAMED.digest(), name) for name in NAMES]
        self.held = {key for number, key in enumerate(key_of) if number not in missing}
        self.damaged = {key_of[number] for number in damaged}
        self.calls = []

    def access(self):
        return self

    def close(self):
        pass

    def find(self, keys, deadline_s):
        self.calls.append("find")
        return FoundBlocks(bytes(key in self.held for key in keys))

    def load(self, keys, memory, deadline_s):
        self.calls.append("load")
        for blocks, key in enumerate(keys):
            if key in self.damaged:
                self.damaged.discard(key)
                self.held.discard(key)
                return LoadedRun(blocks, CORRUPT)
            if key not in self.held:
                return LoadedRun(blocks, OK if blocks else MISS)
        return LoadedRun(len(keys), OK)


def read(store):
    return NamedSession(store, NAMED).get(NAMES, MEMORY)


def test_blocks_that_are_held_are_read_without_a_lookup():
    store = OtherStore()
    assert read(store) == 6 * [OK]
    assert store.calls == ["load"]


def test_one_lookup_tells_which_blocks_are_not_held():
    store = OtherStore(missing=[1, 2, 4])
    assert read(store) == [OK, MISS, MISS, OK, MISS, OK]
    assert store.calls == ["load", "find", "load"]


@pytest.mark.parametrize("damaged", range(6))
def test_a_damaged_block_is_told_from_one_that_is_not_held(damaged):
    outcomes = read(OtherStore(damaged=[damaged]))
    assert outcomes == [CORRUPT if number == damaged else OK for number in range(6)]
