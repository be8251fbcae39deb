"""The audit log: every change of it shows, several processes share it, floods do not fill it."""

import json
import subprocess
import sys

import pytest

from holdfast.store.audit import DENIED_MAX, FIRST, AuditLog, check


@pytest.fixture
def log(tmp_path):
    return AuditLog(tmp_path / "audit.jsonl")


def lines(log):
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def filled(log, count=5):
    for number in range(count):
        log.record("rotate", domain="acme", epoch=number)
    return log.path.read_bytes().splitlines(keepends=True)


def test_a_whole_log_verifies(log):
    filled(log)
    found = check(log.path)
    assert (found.lines, found.faults) == (5, [])
    assert found.head == lines(log)[-1]["hash"]
    first = lines(log)[0]
    assert (first["n"], first["before"], first["domain"]) == (1, FIRST, "acme")
    assert log.path.stat().st_mode & 0o077 == 0


def test_it_goes_on_after_a_restart(log):
    filled(log)
    filled(AuditLog(log.path))
    assert check(log.path).lines == 10
    assert check(log.path).faults == []


@pytest.mark.parametrize("at", range(5))
def test_a_changed_line_shows(log, at):
    kept = filled(log)
    kept[at] = kept[at].replace(b"acme", b"acne")
    log.path.write_bytes(b"".join(kept))
    assert check(log.path).faults == [f"line {at + 1} was changed"]


@pytest.mark.parametrize("at", range(4))
def test_a_removed_line_shows(log, at):
    kept = filled(log)
    log.path.write_bytes(b"".join(kept[:at] + kept[at + 1 :]))
    assert any("lines are missing" in fault for fault in check(log.path).faults)


def test_lines_in_another_order_show(log):
    kept = filled(log)
    log.path.write_bytes(b"".join([kept[1], kept[0], *kept[2:]]))
    assert check(log.path).faults


def test_a_cut_end_shows_by_the_last_hash_only(log):
    kept = filled(log)
    before = check(log.path).head
    log.path.write_bytes(b"".join(kept[:-1]))
    assert check(log.path).faults == []
    assert check(log.path).head != before


def test_a_torn_line_shows_and_the_log_goes_on(log):
    kept = filled(log)
    log.path.write_bytes(b"".join(kept)[:-20])
    log.record("erase", domain="acme")
    found = check(log.path)
    assert found.faults == ["line 5 is not a whole line of the log"]
    assert found.lines == 5


WRITE = """
import sys
from pathlib import Path
from holdfast.store.audit import AuditLog
log = AuditLog(Path(sys.argv[1]))
for number in range(20):
    log.record("rotate", epoch=number)
"""


def test_processes_share_it(log):
    argv = [sys.executable, "-c", WRITE, str(log.path)]
    others = [subprocess.Popen(argv) for _ in range(3)]
    assert [other.wait(60) for other in others] == [0, 0, 0]
    assert (check(log.path).lines, check(log.path).faults) == (60, [])


def test_the_same_denial_is_written_once_a_minute(log):
    for _ in range(1_000):
        log.deny("10.0.0.7", "token: expired")
    log.deny("10.0.0.8", "token: expired")
    assert [line["who"] for line in lines(log)] == ["10.0.0.7", "10.0.0.8"]


def test_a_flood_of_denials_does_not_fill_it(log):
    for number in range(3 * DENIED_MAX):
        log.deny(f"10.0.{number >> 8}.{number & 255}", "token: forged")
    assert len(lines(log)) == DENIED_MAX + 1


def test_a_line_that_can_not_be_written_fails_nothing(tmp_path, caplog):
    log = AuditLog(tmp_path / "none" / "audit.jsonl")
    log.record("erase", domain="acme")
    assert "lost: No such file" in caplog.text or "lost" in caplog.text


def test_without_a_path_it_forgets():
    AuditLog().record("erase", domain="acme")
    AuditLog().deny("somebody", "something")
