"""The live curve of a node is that of `sim` for the same requests, in bounded memory."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.node.recent import MULTIPLES, RecentRequests
from holdfast.sim.curve import curve
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading
from holdfast.status import CurveStatus

BLOCK = SimpleNamespace(block_tokens=16, slot_bytes=1000)
OTHER = SimpleNamespace(block_tokens=32, slot_bytes=1000)


def packed(chain):
    return b"".join(name.to_bytes(8, "little") + bytes(8) for name in chain)


def test_the_hit_curve_equals_the_simulators_for_the_same_requests(tmp_path):
    random, recent, lines = np.random.default_rng(3), RecentRequests(), []
    for number in range(80):
        blocks = int(random.integers(1, 30))
        of = 100 * int(random.integers(5))
        chain = [of + block for block in range(blocks)]
        recent.note(BLOCK, packed(chain), 16 * blocks + 5, float(number))
        keys = [packed([name]).hex() for name in chain]
        row = {"at_s": number**1.1, "fingerprint": "ab", "tokens": 16 * blocks + 5, "keys": keys}
        lines.append(json.dumps(row) + "\n")
    file = tmp_path / "recorded.jsonl"
    file.write_text("".join(lines))
    exact = curve(load(file, Reading(block_tokens=16)))
    found = recent.curve({"host": 20_000, "disk": 60_000})
    assert (found.requests, found.accesses, found.span_s) == (80, exact.blocks, 79.0)
    assert (found.block_bytes, found.unlimited) == (1000.0, exact.token_hit(10**6))
    assert [tier.tier for tier in found.tiers] == ["host", "disk"]
    for tier, blocks in zip(found.tiers, (20, 60), strict=True):
        expected = [exact.token_hit(int(multiple * blocks)) for multiple in MULTIPLES]
        assert [*tier.hits] == ["0.5", "1", "2", "10"]
        assert [*tier.hits.values()] == expected
    assert found.tiers[0].hits["0.5"] < found.tiers[0].hits["10"]


@given(st.lists(st.integers(0, 12), max_size=40))
def test_memory_is_bounded_and_the_oldest_requests_are_forgotten(lengths):
    recent = RecentRequests(accesses_max=10)
    for number, blocks in enumerate(lengths):
        recent.note(BLOCK, packed(range(blocks)), 16 * blocks, float(number))
        found = recent.curve({"host": 1000})
        assert found.accesses <= 10
        assert found.requests <= number + 1
        assert found.requests >= 1


def test_requests_of_another_block_size_are_left_out_and_counted():
    recent = RecentRequests()
    for namespace in (BLOCK, OTHER, BLOCK):
        recent.note(namespace, packed(range(4)), 100, 0.0)
    found = recent.curve({"host": 4000, "pool": 0})
    assert (found.requests, found.left_out, found.block_tokens) == (2, 1, 16)
    assert found.unlimited == pytest.approx(64 / 200)
    assert [tier.tier for tier in found.tiers] == ["host"]


def test_the_hit_curve_is_zero_without_requests_or_blocks():
    recent = RecentRequests()
    assert recent.curve({"host": 1000}) == CurveStatus()
    recent.note(BLOCK, b"", 5, 0.0)
    assert recent.curve({"host": 1000}).requests == 1
    assert recent.curve({"host": 1000}).unlimited == 0.0
