"""Whatever is in a file beside the data, a store opens, and says in its log that it ignored it."""

import os
import random
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.assemble.node_files import ESTIMATES_FILE
from holdfast.clock import ManualClock
from holdfast.errors import ConfigError, FormatError, RefusedError
from holdfast.keys import keyring_file
from holdfast.keys.audit import AuditLog
from holdfast.keys.audit import check as check_audit
from holdfast.keys.keyring import KeyRing
from holdfast.store.estimates import EngineId, EngineStep, Estimates
from holdfast.store.estimates_file import EstimatesFile
from holdfast.testing.embedded import FINGERPRINT, serves
from holdfast_bench.campaigns.fuzz import mutated

NESTED = b"[" * 200_000
DEEP_OBJECTS = b'{"version":1,"tiers":' + b'{"a":' * 100_000


def _made(version: object = 1, tiers: object = None, engines: object = None) -> bytes:
    return msgspec.json.encode({"version": version, "tiers": tiers, "engines": engines})


CONTENTS = {
    "nested": NESTED,
    "nested_objects": DEEP_OBJECTS,
    "nested_and_closed": b"[" * 50_000 + b"]" * 50_000,
    "binary": bytes(range(256)) * 64,
    "empty": b"",
    "huge": b" " * (20 << 20),
    "no_number": b'{"version":1,"tiers":NaN,"engines":[]}',
    "too_large_number": b'{"version":1,"tiers":{"disk":{"rows":[[1e999]]}},"engines":[]}',
    "long_integer": b'{"version":' + b"9" * 10_000 + b"}",
    "another_version": _made(99, {}, []),
    "wrong_types": _made(1, 7, "engines"),
    "list": b"[1,2,3]",
    "null": b"null",
    "tiers_of_another_kind": _made(1, {"disk": [1, 2]}, []),
    "engines_of_another_kind": _made(1, {}, [1, None]),
    "engines_in_an_object": _made(1, {}, {"a": 1}),
    "not_utf8": b'{"version":1,"tiers":"\xff\xfe"}',
}


def open_in(folder: Path):
    return holdfast.open(host="16 MiB", disk="32 MiB", path=str(folder))


@pytest.fixture
def folder(tmp_path):
    with open_in(tmp_path / "tier") as store:
        serves(store.session(FINGERPRINT), 1)
    (tmp_path / "tier" / ESTIMATES_FILE).unlink(missing_ok=True)
    return tmp_path / "tier"


def check_opens(folder: Path, caplog) -> None:
    with open_in(folder) as store:
        serves(store.session(FINGERPRINT), 2)
    assert ESTIMATES_FILE in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_invalid_saved_estimates_are_ignored(content, folder, caplog) -> None:
    (folder / ESTIMATES_FILE).write_bytes(content)
    check_opens(folder, caplog)


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "device"])
def test_an_estimates_file_that_is_not_a_regular_file_is_ignored(kind, folder, caplog) -> None:
    file = folder / ESTIMATES_FILE
    match kind:
        case "folder":
            file.mkdir()
        case "fifo":
            os.mkfifo(file)
        case "loop":
            file.symlink_to(file)
        case "device":
            file.symlink_to("/dev/zero")
    check_opens(folder, caplog)


def test_a_fifo_in_place_of_the_temporary_estimates_file_does_not_block_a_close(
    folder, caplog
) -> None:
    os.mkfifo(folder / f".{ESTIMATES_FILE}.new-left")
    with open_in(folder) as store:
        serves(store.session(FINGERPRINT), 2)
        store.estimates.changes += 1
    assert store._is_over, "the close did not end"
    assert "closing did not end" not in caplog.text
    assert "Traceback" not in caplog.text


def test_a_key_ring_of_deeply_nested_json_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "keyring").write_bytes(NESTED)
    with pytest.raises(FormatError, match="keyring"):
        keyring_file.read(tmp_path / "keyring")


def test_a_deeply_nested_audit_log_line_is_a_fault_and_new_lines_are_still_written(
    tmp_path,
) -> None:
    file = tmp_path / "audit.log"
    file.write_bytes(b'{"n":' + b"[" * 20_000 + b"\n")
    AuditLog(file).record("start")
    assert check_audit(file).faults[0] == "line 1 is not a whole line of the log"


def taught() -> Estimates:
    """Return estimates with something in every part."""
    estimates = Estimates(["host", "disk"], ManualClock())
    for at in range(1, 40):
        estimates.computed(EngineId("engine", "f"), [EngineStep(at * 100, 0, at * 0.01)])
        estimates.asked(1, at << 20, b"d")
        estimates.arrived(1, at << 20, b"d", of=at << 20)
    estimates.update_fits()
    return estimates


def test_damaged_saved_estimates_are_loaded_or_ignored(tmp_path, caplog) -> None:
    file, rng = tmp_path / ESTIMATES_FILE, random.Random(17)
    EstimatesFile(before := taught(), file).load()
    before.changes += 1
    kept = EstimatesFile(before, file)
    before.changes += 1
    kept.save()
    made, taken = file.read_bytes(), 0
    for _ in range(2_000):
        file.write_bytes(mutated([made], rng))
        caplog.clear()
        again = Estimates(["host", "disk"], ManualClock())
        EstimatesFile(again, file).load()
        taken += not caplog.records
        for estimate in again.estimates(b"d"):
            assert 0 <= estimate.seconds(1 << 20) < float("inf")
        msgspec.json.encode(again.as_data())
    assert 0 < taken < 2_000


def test_a_damaged_key_ring_is_loaded_or_refused_by_name(tmp_path) -> None:
    file, rng = tmp_path / "ring.json", random.Random(17)
    ring = KeyRing(file)
    for name in ("acme", "other"):
        ring.enrol(name, name.encode().ljust(32, b"s"))
        ring.rotate(name)
    made, refused, unchanged = file.read_bytes(), [], 0
    for _ in range(1_000):
        damaged = mutated([made], rng)
        file.write_bytes(damaged)
        try:
            KeyRing(file).enrol("acme", b"acme".ljust(32, b"s"))
        except (FormatError, RefusedError, ConfigError) as error:
            refused.append(str(error))
            unchanged += file.read_bytes() == damaged
    assert len(refused) > 500
    assert unchanged == len(refused)
    assert all("ring.json" in words for words in refused)


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "device"])
def test_a_key_ring_that_is_not_a_regular_file_is_refused_by_name(kind, tmp_path) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_bytes(b"k" * 32)
    ring = tmp_path / "ring.json"
    match kind:
        case "folder":
            ring.mkdir()
        case "fifo":
            os.mkfifo(ring)
        case "loop":
            ring.symlink_to(ring)
        case "device":
            ring.symlink_to("/dev/zero")
    file = tmp_path / "host.yaml"
    file.write_text(f"""
listen: unix://{tmp_path}/holdfast.sock
domains: {{default: {{key_file: {tmp_path}/key}}}}
keyring: {ring}
tiers: [{{kind: host, capacity: 16 MiB}}, {{kind: disk, path: {tmp_path}/tier, capacity: 32 MiB}}]
""")
    with pytest.raises((ConfigError, FormatError), match=r"keyring: .*ring\.json"):
        holdfast.open(str(file))


@pytest.mark.parametrize("kind", ["empty", "text", "folder", "fifo", "loop"])
def test_an_invalid_key_file_of_the_default_domain_is_refused_by_name(kind, folder) -> None:
    key = folder / "default.key"
    key.unlink()
    match kind:
        case "empty":
            key.touch(0o600)
        case "text":
            key.touch(0o600)
            key.write_bytes(NESTED[:64])
        case "folder":
            key.mkdir()
        case "fifo":
            os.mkfifo(key, 0o600)
        case "loop":
            key.symlink_to(key)
    with pytest.raises(ConfigError, match=r"domains\.default: .*default\.key"):
        open_in(folder)


@pytest.mark.parametrize("kind", ["binary", "huge", "fifo", "folder"])
def test_an_invalid_lock_file_is_overwritten_or_refused_by_name(kind, folder) -> None:
    lock = folder / "lock"
    lock.unlink()
    match kind:
        case "binary":
            lock.write_bytes(bytes(range(256)))
        case "huge":
            lock.write_bytes(b"9" * 100_000)
        case "fifo":
            os.mkfifo(lock)
        case "folder":
            lock.mkdir()
            with pytest.raises(ConfigError, match="Is a directory"):
                open_in(folder)
            return
    with open_in(folder) as store:
        serves(store.session(FINGERPRINT), 2)
