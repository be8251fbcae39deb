"""Locking memory, and launches beside it, at toy sizes."""

import io
import sys

import msgspec
import pytest

pytest.importorskip("torch")

from holdfast_bench.measure.gpu import launching, locking
from holdfast_bench.measure.gpu.launching import LaunchLoop, LongLaunch, longest_ms

CALLS = ("chunk.huge_pages", "large.huge_pages", "chunk.small_pages")
WHO = ("thread", "process")


def test_calls_and_stalls_are_measured(measured):
    found = measured(locking)
    assert {what: row.goal for what, row in found.items()} == {
        **{f"gpu.{verb}.{call}": None for call in CALLS for verb in ("lock", "unlock")},
        "gpu.unlock.beside_kernel": None,
        **{f"gpu.{verb}.stall.{who}": 5.0 for who in WHO for verb in ("lock", "unlock")},
    }
    assert all(row.value is not None for row in found.values())


def test_a_second_process_that_ends_early_is_named(measured, monkeypatch):
    monkeypatch.setattr(locking, "PROCESS", "this")  # the Zen of Python, and no list of launches
    monkeypatch.setattr(locking.msgspec.json, "decode", lambda *_, **__: None)
    found = measured(locking)
    assert found["gpu.lock.stall.process"].more == {"why": "the other process ended early"}


def test_the_longest_launch_between_two_times_counts():
    launches = [LongLaunch(1.0, 0.5), LongLaunch(2.0, 0.1), LongLaunch(3.0, 0.9)]
    assert longest_ms(launches, 1.4, 2.5) == 500
    assert longest_ms(launches, 1.6, 2.5) == 100
    assert longest_ms(launches, 5.0, 6.0) == 0


def test_launches_that_take_long_are_noted(setting, monkeypatch):
    monkeypatch.setattr(launching, "LONG_S", 0.0)
    monkeypatch.setattr(launching, "BETWEEN_WAITS", 1)
    monkeypatch.setattr(launching, "NOTED_MAX", 2)
    loop = LaunchLoop(setting.gpu)
    loop.start()
    while len(loop._found) < 2:
        pass
    assert len(loop.stop()) == 2


def test_the_second_process_launches_until_its_input_ends(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert launching.main(["--rehearse"]) == 0
    ready, launches = capsys.readouterr().out.splitlines()
    assert ready == "ready"
    assert isinstance(msgspec.json.decode(launches, type=list[LongLaunch]), list)
