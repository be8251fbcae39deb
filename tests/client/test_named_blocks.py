"""Blocks that an engine names itself: the same outcomes embedded and through a node."""

import hashlib

import numpy as np
import pytest

import holdfast
from holdfast import Outcome, Retention
from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import OpaqueLayout
from holdfast.client.named_blocks import open_named_session
from holdfast.errors import BlockError
from holdfast.limits import MIB
from holdfast.named_blocks import PrefixPosition, memory_of
from holdfast.testing.embedded import FINGERPRINT
from holdfast_bench.harness.process import wait_until

NBYTES = 4_096
MISSED = [Outcome.MISS]
OK = [Outcome.OK]


def fingerprint(nbytes=NBYTES, naming="engine sha256", arrangement="rank 0 of 1"):
    meaning = Meaning(
        model="m",
        positions="none",
        adapter="none",
        kv_quantisation="none",
        kv_scales="none",
        naming=naming,
        block_tokens=16,
        kv_group=KvGroup.all_layers(2),
    )
    layout = OpaqueLayout(
        dtype="float16",
        block_tokens=16,
        layers=2,
        nbytes=nbytes,
        arrangement=arrangement,
        engine="engine",
        engine_version="1",
    )
    return Fingerprint(meaning, layout)


def name(number):
    return hashlib.sha256(str(number).encode()).digest()


def names(count, first=0):
    return [name(first + i) for i in range(count)]


def rows(count, seed=0, nbytes=NBYTES):
    return np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)


def memory(blocks):
    return [memory_of(block) for block in blocks]


def test_each_block_is_found_and_read_by_itself(store):
    named, saved = store.named_session(fingerprint()), rows(6)
    assert named.exists(names(6)) == 6 * MISSED
    assert named.put(names(6), memory(saved)) == 6 * OK
    wanted = [name(i) for i in (5, 99, 0, 3, 98)]
    expected = [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK, Outcome.MISS]
    assert named.exists(wanted) == expected
    found = np.zeros_like(rows(5))
    assert named.get(wanted, memory(found)) == expected
    assert (found[[0, 2, 3]] == saved[[5, 0, 3]]).all()
    assert not found[[1, 4]].any()
    named.close()


def test_a_block_may_lie_in_several_ranges_of_memory(store):
    named, saved = store.named_session(fingerprint()), rows(1)[0]
    halves = [*memory_of(saved[: NBYTES // 2]), *memory_of(saved[NBYTES // 2 :])]
    assert named.put([name(0)], [halves]) == OK
    keys, values = np.zeros(NBYTES // 4, np.uint8), np.zeros(3 * NBYTES // 4, np.uint8)
    assert named.get([name(0)], [[*memory_of(keys), *memory_of(values)]]) == OK
    assert (np.concatenate([keys, values]) == saved).all()
    named.close()


def test_a_block_that_is_held_is_not_replaced(store):
    named, first, second = store.named_session(fingerprint()), rows(2), rows(2, seed=1)
    named.put(names(1), memory(first[:1]))
    assert named.put(names(2), memory(second)) == 2 * OK
    found = np.zeros_like(first)
    assert named.get(names(2), memory(found)) == 2 * OK
    assert (found == [first[0], second[1]]).all()
    named.close()


@pytest.mark.parametrize(
    "other",
    [
        fingerprint(naming="engine sha256 seed 1"),
        fingerprint(arrangement="rank 1 of 2"),
        fingerprint(nbytes=2 * NBYTES),
    ],
    ids=["naming", "arrangement", "size"],
)
def test_blocks_of_another_fingerprint_are_not_found(store, other):
    named = store.named_session(fingerprint())
    named.put(names(2), memory(rows(2)))
    others = store.named_session(other)
    assert others.exists(names(2)) == 2 * MISSED
    named.close()
    others.close()


def test_a_batch_larger_than_memory_is_read_from_the_disk_in_parts(store):
    nbytes, count = MIB, 40
    named = store.named_session(fingerprint(nbytes))
    for first in range(0, count, 8):
        at = PrefixPosition(name(first - 1) if first else b"", first)
        part = rows(8, first, nbytes)
        assert named.put(names(8, first), memory(part), at) == 8 * OK
    found = np.zeros((count, nbytes), np.uint8)
    assert named.get(names(count), memory(found), deadline_s=60) == count * OK
    expected = np.concatenate([rows(8, first, nbytes) for first in range(0, count, 8)])
    assert (found == expected).all()
    named.close()


def test_a_short_name_is_refused_because_it_may_collide(store):
    named = store.named_session(fingerprint())
    with pytest.raises(BlockError, match="8 bytes, not from 16 to 256"):
        named.exists([bytes(8)])
    named.close()


def test_memory_of_another_length_is_refused(store):
    named = store.named_session(fingerprint())
    with pytest.raises(BlockError, match="memory of 5 bytes given for a block of 4096"):
        named.put(names(1), [[(0, 5)]])
    with pytest.raises(BlockError, match="1 blocks of memory given for 2 names"):
        named.get(names(2), memory(rows(1)))
    named.close()


def test_memory_that_is_not_mapped_is_an_outcome(store):
    named = store.named_session(fingerprint())
    assert named.put(names(1), [[(4_096, NBYTES)]]) == [Outcome.GONE]
    assert named.exists(names(1)) == MISSED
    named.put(names(1), memory(rows(1)))
    assert named.get(names(1), [[(4_096, NBYTES)]]) == [Outcome.LATE]
    named.close()


def test_nothing_is_copied_into_slots_that_may_be_those_of_other_blocks(node, monkeypatch):
    monkeypatch.setattr("holdfast.client.fresh_slots.FILL_S", -1.0)  # every slot is too old
    named = open_named_session(node.address, fingerprint(), peer="test")
    assert named.put(names(2), memory(rows(2))) == 2 * [Outcome.GONE]
    monkeypatch.undo()
    assert named.exists(names(2)) == 2 * MISSED
    assert named.put(names(2), memory(rows(2))) == 2 * OK
    named.close()


def test_a_fingerprint_whose_blocks_are_named_by_tokens_is_refused(store):
    with pytest.raises(BlockError, match="named by tokens"):
        store.named_session(FINGERPRINT)


def test_a_closed_store_is_an_outcome_and_not_an_exception(tmp_path):
    with holdfast.open(host="16 MiB") as store:
        named = store.named_session(fingerprint())
        named.put(names(1), memory(rows(1)))
    assert named.exists(names(2)) == 2 * [Outcome.GONE]
    assert named.get(names(1), memory(rows(1))) == [Outcome.GONE]
    assert named.put(names(1), memory(rows(1))) == [Outcome.GONE]


def test_a_node_that_goes_is_an_outcome_and_its_blocks_are_found_when_it_is_back(node):
    named = open_named_session(node.address, fingerprint(), peer="test")
    saved = rows(3)
    assert named.put(names(3), memory(saved), retention=Retention.DURABLE) == 3 * OK
    with holdfast.open(node.address, domain="default") as store:
        wait_until(node.process, lambda: store.status().tiers[1].records == 3, 60)
    node.process.stop()
    found = np.zeros_like(saved)
    assert named.exists(names(3)) == 3 * [Outcome.GONE]
    assert named.get(names(3), memory(found)) == 3 * [Outcome.GONE]
    assert named.put(names(3), memory(saved)) == 3 * [Outcome.GONE]
    node.start()
    wait_until(node.process, lambda: named.exists(names(3)) == 3 * OK, 60)
    assert named.get(names(3), memory(found)) == 3 * OK
    assert (found == saved).all()
    named.close()
