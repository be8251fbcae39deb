"""The bus, loads and saves of blocks, and decoding beside them, at toy sizes."""

import pytest

pytest.importorskip("torch")

from holdfast.errors import HoldfastError
from holdfast_bench.measure.gpu import bus, copies, decode
from holdfast_bench.measure.gpu.block_copies import BlockCopies, check_copied
from holdfast_bench.measure.gpu.shapes import SHAPES, TOY

MIB = 1 << 20


def test_the_bus_is_measured_each_way_and_both_ways(measured):
    assert list(measured(bus)) == [
        *[f"gpu.bus.{way}.{blocks}" for blocks in (1, 8, 64) for way in ("to", "from")],
        "gpu.bus.both.64",
    ]


def test_every_kind_of_copy_has_its_row_and_its_goal(measured):
    found = measured(copies)
    assert {what: row.goal for what, row in found.items()} == {
        **{f"gpu.{verb}.toy.{n}": goal for n, goal in ((64, 0.9), (8, 0.75), (1, 0.5))
           for verb in ("load", "save")},
        **{f"gpu.{verb}.toy.{ending}": 0.5 for ending in ("8.busy", "64.busy.quiet")
           for verb in ("load", "save")},
        **{f"gpu.save.call.{state}": 0.1 for state in ("quiet", "busy")},
        **{f"gpu.{verb}.toy.64.bounce": None for verb in ("load", "save")},
    }  # fmt: skip
    assert all(row.limit for what, row in found.items() if "call" not in what)


def test_copies_for_which_no_time_is_left_are_named(measured, monkeypatch):
    monkeypatch.setattr(copies, "ROW_S", 1e9)
    found = measured(copies)
    assert found["gpu.load.toy.64"].more == {"why": "no time was left"}
    assert found["gpu.load.toy.64.busy.quiet"].value is None


def test_decoding_is_measured_beside_loads_and_saves(measured):
    found = measured(decode)
    goals = {what: row.goal for what, row in found.items() if "pieces" not in what}
    assert goals == {
        "gpu.decode.alone": None,
        "gpu.decode.small_copy.alone": None,
        "gpu.decode.load": 0.94,
        "gpu.decode.small_copy.load": 1.2,
        "gpu.decode.load.half": 0.97,
        "gpu.decode.save": 0.94,
        "gpu.decode.save.half": 0.97,
    }
    assert found["gpu.decode.load"].more["copied_gb_per_s"] > 0
    pieces = [row for what, row in found.items() if "pieces" in what]
    assert [row.what.rpartition("pieces.")[2] for row in pieces] == ["64", "64.plain"]
    assert all(row.more["copied_gb_per_s"] > 0 for row in pieces)


def test_decoding_for_which_no_time_is_left_is_named(measured):
    found = measured(decode, until_s=0.0)
    assert found["gpu.decode.save.half"].more == {"why": "no time was left"}


def test_a_copy_that_fails_beside_decoding_ends_the_phase(measured, monkeypatch):
    monkeypatch.setattr(BlockCopies, "load", lambda *_: check_copied(copied=False))
    monkeypatch.setattr(BlockCopies, "verify", lambda *_: None)
    with pytest.raises(HoldfastError, match="not copied whole"):
        measured(decode)


def test_a_wrong_byte_is_an_error_and_no_figure(setting):
    class Forgetful(BlockCopies):
        def load(self, moves):
            super().load(moves[1:])

    one = Forgetful(setting.gpu, TOY, 4)
    with pytest.raises(HoldfastError, match="4 blocks of toy came back with other bytes"):
        one.verify(4)
    one.close()


def test_blocks_have_the_sizes_of_the_published_models():
    assert {shape.model: shape.block_bytes for shape in SHAPES} == {
        "llama-3.1-8b": 16 * MIB,
        "deepseek-v3": 61 * 128 * 576 * 2,
        "llama-3.1-70b-tp8": 5 * MIB,
    }
