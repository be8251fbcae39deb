"""The audit log: every change of it shows, several processes share it, floods do not fill it."""

import json
import math
import os
import subprocess
import sys
import threading

import pytest

from holdfast.keys import audit
from holdfast.keys.audit import (
    FIRST,
    VALUE_CHARS_MAX,
    AuditLog,
    check,
)
from holdfast.keys.denials import DENIALS_APART_MAX_S, DENIALS_APART_S, DENIED_MAX, REASONS_MAX
from holdfast.limits import MIB


@pytest.fixture
def log(tmp_path):
    return AuditLog(tmp_path / "audit.jsonl")


def lines(log):
    log.catch_up()
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def filled(log, count=5):
    for number in range(count):
        log.record("rotate", domain="acme", epoch=number)
    return log.path.read_bytes().splitlines(keepends=True)


def test_a_complete_audit_log_verifies(log):
    filled(log)
    found = check(log.path)
    assert (found.lines, found.faults) == (5, [])
    assert found.head == lines(log)[-1]["hash"]
    first = lines(log)[0]
    assert (first["n"], first["before"], first["domain"]) == (1, FIRST, "acme")
    assert log.path.stat().st_mode & 0o077 == 0


def test_an_audit_log_continues_after_a_restart(log):
    filled(log)
    filled(AuditLog(log.path))
    assert check(log.path).lines == 10
    assert check(log.path).faults == []


@pytest.mark.parametrize("at", range(5))
def test_a_changed_line_is_detected(log, at):
    kept = filled(log)
    kept[at] = kept[at].replace(b"acme", b"acne")
    log.path.write_bytes(b"".join(kept))
    assert check(log.path).faults == [f"line {at + 1} was changed"]


@pytest.mark.parametrize("at", range(4))
def test_a_removed_line_is_detected(log, at):
    kept = filled(log)
    log.path.write_bytes(b"".join(kept[:at] + kept[at + 1 :]))
    assert any("lines are missing" in fault for fault in check(log.path).faults)


def test_reordered_lines_are_detected(log):
    kept = filled(log)
    log.path.write_bytes(b"".join([kept[1], kept[0], *kept[2:]]))
    assert check(log.path).faults


def test_a_truncated_log_is_detected_only_by_its_last_hash(log):
    kept = filled(log)
    before = check(log.path).head
    log.path.write_bytes(b"".join(kept[:-1]))
    assert check(log.path).faults == []
    assert check(log.path).head != before


def test_a_torn_line_is_detected_and_the_log_continues(log):
    kept = filled(log)
    log.path.write_bytes(b"".join(kept)[:-20])
    log.record("erase", domain="acme")
    found = check(log.path)
    assert found.faults == ["line 5 is not a whole line of the log"]
    assert found.lines == 5


WRITE = """
import sys
from pathlib import Path
from holdfast.keys.audit import AuditLog
log = AuditLog(Path(sys.argv[1]))
for number in range(20):
    log.record("rotate", epoch=number)
"""


def test_several_processes_share_one_audit_log(log):
    argv = [sys.executable, "-c", WRITE, str(log.path)]
    others = [subprocess.Popen(argv) for _ in range(3)]
    assert [other.wait(60) for other in others] == [0, 0, 0]
    assert (check(log.path).lines, check(log.path).faults) == (60, [])


def test_the_same_denial_is_written_once_a_minute(log):
    for _ in range(1_000):
        log.deny("10.0.0.7", "token: expired")
    log.deny("10.0.0.8", "token: expired")
    assert [line["who"] for line in lines(log)] == ["10.0.0.7", "10.0.0.8"]


def test_a_flood_of_denials_does_not_fill_the_log(log):
    for number in range(3 * DENIED_MAX):
        log.deny(f"host 10.0.{number >> 8}.{number & 255}", "token: forged")
    assert len(lines(log)) == DENIED_MAX + 1


def test_many_denials_of_one_peer_do_not_hide_denials_of_others(log):
    for number in range(3 * REASONS_MAX):
        log.deny("user 2001", f"domain 'team-{number}' is not for user 2001")
    for number in range(2 * DENIED_MAX):
        log.deny(f"peer {number}", "asked for domain 'acme'")
    before = len(lines(log))
    assert before == REASONS_MAX + 1 + DENIED_MAX + 1
    log.deny("user 2002", "domain 'acme' is not for user 2002")
    log.deny("host 10.9.9.9", "token: not made with this target's key")
    assert [line["who"] for line in lines(log)[before:]] == ["user 2002", "host 10.9.9.9"]


def test_denials_that_differ_only_in_digits_of_a_name_are_distinguished(log):
    for number in (1, 2):
        log.deny("user 2001", f"domain 'team-{number}' is not for user 2001")
    assert [line["why"][8:14] for line in lines(log)] == ["team-1", "team-2"]


def test_denials_are_written_again_after_a_minute_with_the_number_left_out(log, monkeypatch):
    now = [1_000.0]
    monkeypatch.setattr(audit.time, "monotonic", lambda: now[0])
    for number in range(DENIED_MAX + 5):
        log.deny(f"host {number}", "token: forged")
        log.deny(f"host {number}", "token: forged")
    before = len(lines(log))
    now[0] += DENIALS_APART_S
    after = lines(log)[before:]
    assert sum(line["unsaid"] for line in after) == DENIED_MAX + 2 * 5 - 1
    log.deny("host again", "token: forged")
    last = lines(log)[-1]
    assert (last["who"], last["unsaid"]) == ("host again", 0)


def test_all_postponed_denials_are_synced_to_disk_at_once(log, monkeypatch):
    for number in range(DENIED_MAX):
        log.deny(f"host {number}", "token: forged")
        log.deny(f"host {number}", "token: forged")
    log.catch_up()
    synced = []
    monkeypatch.setattr(audit.os, "fsync", synced.append)
    log.catch_up(whole=True)
    assert len(synced) == 1
    verdict = check(log.path)
    assert (verdict.lines, verdict.faults) == (2 * DENIED_MAX, [])


def test_text_from_a_peer_is_truncated_before_it_is_stored(log):
    log.deny("user " + "7" * MIB, "domain " + "1 " * MIB)
    (told,) = log._unwritten
    assert max(len(told.who), len(told.why)) == VALUE_CHARS_MAX


def test_a_rewritten_log_verifies_but_lacks_the_hash_recorded_elsewhere(log):
    kept = filled(log)
    head, before, made = check(log.path).head, FIRST, []
    for number, text in enumerate(kept[:1] + kept[2:], 1):
        line = {**json.loads(text), "n": number, "before": before}
        before = line["hash"] = audit._hash(line)
        made.append(json.dumps(line) + "\n")
    log.path.write_text("".join(made))
    assert check(log.path).faults == []
    assert head not in log.path.read_text()


def test_a_line_that_cannot_be_written_is_counted_and_raises_no_error(tmp_path, caplog):
    log = AuditLog(tmp_path / "none" / "audit.jsonl")
    log.record("erase", domain="acme")
    assert "lost: erase {'domain': 'acme'}" in caplog.text
    log.deny("user 7", "no")
    log.catch_up()
    assert (log.lost(), log.counts()) == (2, {"erase": 1, "denied": 1})


def test_a_partly_written_line_is_reported_and_the_log_continues(log, monkeypatch, caplog):
    filled(log, 1)
    write = os.write
    monkeypatch.setattr(audit.os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    log.deny("host 10.0.0.9", "token: forged")
    log.catch_up()
    assert "No space left" in caplog.text
    assert "lost: denied" in caplog.text
    monkeypatch.undo()
    log.record("erase", domain="acme")
    verdict = check(log.path)
    assert verdict.lines == 2
    assert verdict.faults == ["line 2 is not a whole line of the log"]


def test_an_audit_log_without_a_path_stores_nothing():
    AuditLog().record("erase", domain="acme")
    AuditLog().deny("somebody", "something")


def test_counted_denials_are_written_after_their_minute_or_at_the_close(log, monkeypatch):
    now = [1_000.0]
    monkeypatch.setattr(audit.time, "monotonic", lambda: now[0])
    for _ in range(10):
        log.deny("host 10.0.0.9", "token: forged")
    log.catch_up()
    assert len(lines(log)) == 1
    now[0] += DENIALS_APART_S
    log.catch_up()
    assert [line["unsaid"] for line in lines(log)] == [0, 9]
    for _ in range(3):
        log.deny("host 10.0.0.9", "token: forged")
    log.catch_up(whole=True)
    assert [line["unsaid"] for line in lines(log)] == [0, 9, 3]


def test_a_repeated_denial_is_recorded_at_growing_intervals(log, monkeypatch):
    now = [1_000.0]
    monkeypatch.setattr(audit.time, "monotonic", lambda: now[0])
    for second in range(6 * 3_600):
        now[0] += 1
        log.deny("host 10.0.0.9", f"token: expired {second} s ago by this target's clock")
        if not second % 10:
            log.catch_up()
    log.catch_up(whole=True)
    told = lines(log)
    assert sum(1 + line["unsaid"] for line in told) - len(told) + 1 == 6 * 3_600
    assert len(told) <= 2 + math.log2(DENIALS_APART_MAX_S / DENIALS_APART_S) + 6


def test_a_denial_does_not_wait_for_the_file_system(log, monkeypatch):
    """It is noted in an event loop's thread, which no file system may stop."""
    with monkeypatch.context() as hung, log._writing:
        hung.setattr(audit, "_append", lambda *_: 1 / 0)
        log.deny("user 2001", "domain 'acme' is not for user 2001")
        assert log.counts() == {"denied": 1}
    assert not log.path.exists()
    assert [line["who"] for line in lines(log)] == ["user 2001"]


def test_the_number_of_unwritten_denials_is_bounded(log):
    for number in range(3 * DENIED_MAX):
        for reason in range(2 * REASONS_MAX):
            log.deny(f"host {number}", f"reason {reason}")
    assert len(log._unwritten) == (DENIED_MAX + 1) * (REASONS_MAX + 1)


def test_denials_are_written_by_one_thread_and_no_caller_waits(log):
    log.start_catch_up()
    assert not [each for each in threading.enumerate() if each.name == "holdfast-audit"]
    log.deny("user 1000", "no such domain")
    with log._writing:  # as if the file system hung
        log.start_catch_up()
        log.start_catch_up()
        [writer] = [each for each in threading.enumerate() if each.name == "holdfast-audit"]
    writer.join(60)
    [line] = log.path.read_text().splitlines()
    assert json.loads(line)["who"] == "user 1000"
