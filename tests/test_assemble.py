"""Assembly: which keys the domains get, and what refuses to start leaves everything as it was."""

import os
import stat
import threading
from pathlib import Path

import pytest

import holdfast
from holdfast.assemble import DROPS_FILE, ESTIMATES_FILE, MARKS_FILE, open_store
from holdfast.assemble.domains import DEFAULT_KEY_FILE
from holdfast.config import defaults, parse
from holdfast.errors import BusyError, ConfigError
from holdfast.policy.admit import AlwaysAdmit, PerDomain, ReusePrediction, SecondTouch, WriteBudget
from holdfast.policy.cost_aware import CostAware
from holdfast.policy.leaf import LeafLru
from holdfast.policy.lirs import Lirs
from holdfast.policy.s3fifo import S3Fifo
from holdfast.store.call_threads import DirectCalls
from holdfast.store.scrub import Scrubber
from holdfast.tiers.disk.folder import check_usable, mount_point

MIB = 1 << 20


@pytest.fixture
def configured(tmp_path):
    def configure(*, disk=True, **more):
        tiers = [{"kind": "host", "capacity": 16 * MIB}]
        if disk:
            tiers.append({"kind": "disk", "path": str(tmp_path / "disk"), "capacity": 16 * MIB})
        return parse({"listen": f"{tmp_path}/node.sock", "tiers": tiers, **more})

    return configure


def test_the_default_capacities_are_logged_at_the_first_open(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(defaults, "DISK_BYTES_DEFAULT", 16 * MIB)
    monkeypatch.setattr(defaults, "HOST_BYTES_DEFAULT", 16 * MIB)
    for told in (1, 0):
        caplog.clear()
        with holdfast.open():
            pass
        lines = [r.getMessage() for r in caplog.records if "no capacity given" in r.getMessage()]
        assert len(lines) == told
        for line in lines:
            assert f"16 MiB of memory, and 16 MiB of disk in {tmp_path}/holdfast/disk" in line


def key_of(store, name="default"):
    return store.domain(name)[0]


def test_the_default_domains_key_is_made_once_and_kept(configured, tmp_path):
    with open_store(configured()) as store:
        first = key_of(store)
    with open_store(configured()) as store:
        assert key_of(store) == first
    kept = tmp_path / "disk" / "default.key"
    assert kept.read_bytes() == first
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_volatile_store_has_a_new_key_each_time(configured):
    keys = set()
    for _ in range(2):
        with open_store(configured(disk=False)) as store:
            keys.add(key_of(store))
    assert len(keys) == 2


@pytest.mark.parametrize("encode", [bytes, lambda key: key.hex().encode() + b"\n"])
def test_a_domains_key_file_holds_bytes_or_hex(configured, tmp_path, encode):
    key, file = os.urandom(32), tmp_path / "team.key"
    file.write_bytes(encode(key))
    file.chmod(0o600)
    with open_store(configured(disk=False, domains={"team": {"key_file": str(file)}})) as store:
        assert key_of(store, "team") == key
        assert set(store.domain_ids) == {"team", "default"}


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0, r"cannot be read: No such file.*; make it with: \(umask 077; head -c 32"),
        (b"", 0o600, "holds 0 bytes, not a key; it must hold 32 bytes or 64 hex digits"),
        (b"short", 0o600, "holds 5 bytes, not a key; it must hold 32 bytes or 64 hex digits"),
        (b"x" * 64, 0o600, "holds 64 bytes, not a key;"),
        (b"k" * 33, 0o600, "holds 33 bytes, not a key;"),
        (b"k" * 9999, 0o600, "holds 66 bytes or more, not a key;"),
        (b"k" * 32, 0o644, "is open to other users; chmod 600 it"),
    ],
)
def test_a_key_file_that_can_not_be_used_is_refused_by_name(
    configured, tmp_path, content, mode, words
):
    file = tmp_path / "team.key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    config = configured(disk=False, domains={"team": {"key_file": str(file)}})
    with pytest.raises(ConfigError, match=rf"^domains\.team\.key_file: '{file}' {words}"):
        open_store(config)


@pytest.mark.parametrize("error", [PermissionError, IsADirectoryError])
def test_the_error_for_an_unreadable_key_file_does_not_advise_a_new_key(
    configured, tmp_path, monkeypatch, error
):
    file = tmp_path / "team.key"
    file.write_bytes(b"k" * 32)
    file.chmod(0o600)

    def refuse(path, *_, opened=Path.open, **__):
        if path == file:
            raise error(1, "not for you")
        return opened(path, *_, **__)

    config = configured(disk=False, domains={"team": {"key_file": str(file)}})
    monkeypatch.setattr(Path, "open", refuse)
    told = rf"^domains\.team\.key_file: '{file}' cannot be read: not for you; name a file that"
    with pytest.raises(ConfigError, match=told) as refused:
        open_store(config)
    assert "make it" not in str(refused.value)
    monkeypatch.undo()
    assert file.read_bytes() == b"k" * 32


def test_a_store_that_refuses_to_start_releases_the_disk(configured, tmp_path):
    with pytest.raises(ConfigError):
        open_store(configured(domains={"team": {"key_file": str(tmp_path / "none")}}))
    with open_store(configured()) as store:
        with pytest.raises(BusyError, match="in use by process"):
            open_store(configured())
        assert store.status().blocks == 0


class CountedCalls(DirectCalls):
    """Counts how often it is closed."""

    closed = 0

    def close(self, timeout_s):
        self.closed += 1


def test_a_store_that_refuses_to_start_closes_its_call_threads(configured, tmp_path):
    calls = CountedCalls()
    with pytest.raises(ConfigError):
        open_store(configured(domains={"team": {"key_file": str(tmp_path / "none")}}), calls)
    assert calls.closed == 1
    with open_store(configured()), pytest.raises(BusyError):
        open_store(configured(), calls)
    assert calls.closed == 2


def test_a_store_that_fails_while_it_starts_is_closed(configured, monkeypatch):
    calls = CountedCalls()

    def fail(_scrubber):  # the last part that starts
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Scrubber, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        open_store(configured(), calls)
    assert calls.closed == 1
    for thread in threading.enumerate():
        if thread.name in ("holdfast-housekeeping", "holdfast-to-disk"):
            thread.join(60)  # it may be at its last steps
            assert not thread.is_alive()
    monkeypatch.undo()
    open_store(configured()).close()


def test_options_reach_the_store(configured):
    with open_store(configured(lease_s=7, write="on_eviction")) as store:
        assert store.options.lease_s == 7
        assert not store.options.rules[1].intake.saves


@pytest.mark.parametrize(
    ("policy", "kind"),
    [("cost_aware", CostAware), ("leaf_lru", LeafLru), ("s3fifo", S3Fifo), ("lirs", Lirs)],
)
def test_the_policy_is_chosen_by_name(configured, policy, kind):
    with open_store(configured(disk=False, policy=policy)) as store:
        assert type(store.options.make_eviction()) is kind
    with open_store(configured(disk=False)) as store:
        assert type(store.options.make_eviction()) is CostAware


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, AlwaysAdmit),
        ({"admit": "second_touch"}, SecondTouch),
        ({"admit": "reuse"}, ReusePrediction),
        ({"admit": "reuse", "writes_per_day": 0.5}, WriteBudget),
    ],
)
def test_the_admission_rule_of_a_disk_tier_is_chosen_by_name(configured, tmp_path, options, kind):
    disk = {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": 16 * MIB, **options}
    with open_store(configured(tiers=[{"kind": "host", "capacity": 16 * MIB}, disk])) as store:
        assert type(store.options.rules[1].make_rule(lambda _: 0.0)) is kind


def test_domains_get_what_their_options_say(configured, tmp_path):
    file = tmp_path / "acme.key"
    file.write_bytes(b"k" * 32)
    file.chmod(0o600)
    acme = {"key_file": str(file), "seal": False, "share": 2, "quota_bytes": {"disk": MIB}}
    acme |= {"reserved_bytes": {"host": 2 * MIB}, "write_budget_bytes_per_day": 3 * MIB}
    disk = {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": 16 * MIB}
    tiers = [{"kind": "host", "capacity": 16 * MIB}, disk]
    with open_store(configured(tiers=tiers, domains={"acme": acme})) as store:
        domain = store.domain("acme")[1]
        assert store.quotas(domain) == {"disk": MIB}
        assert store.share(domain) == 2
        [status] = [each for each in store.status().domains if each.domain == "acme"]
        assert status.reserved_bytes == 2 * MIB
        assert type(store.options.rules[1].make_rule(lambda _: 0.0)) is PerDomain
        assert domain in store.options.rules[1].budgets


@pytest.mark.parametrize("times", [0.0, -1.0, 1e9])
def test_implausible_writes_per_day_are_refused(configured, tmp_path, times):
    disk = {"kind": "disk", "path": str(tmp_path), "capacity": 16 * MIB, "writes_per_day": times}
    with pytest.raises(ConfigError, match=r"tiers\.1\.writes_per_day: .* drive's rating"):
        configured(tiers=[{"kind": "host", "capacity": 16 * MIB}, disk])


def test_a_new_drive_may_have_every_file_that_a_node_writes_beside_its_blocks(configured, tmp_path):
    config = configured()
    drive = tmp_path / "disk"
    drive.mkdir()
    beside = [DEFAULT_KEY_FILE, DROPS_FILE, ESTIMATES_FILE, MARKS_FILE]
    paths = [config.audit_file, config.gates_folder, config.keyring_file]
    locks = [f"{config.keyring_file}.lock"]
    for path in [*(drive / name for name in beside), *map(Path, paths), *map(Path, locks)]:
        assert path.parent == drive
        path.touch()
        (drive / f".{path.name}.new-x1").touch()
    check_usable(str(drive), "disk", mount_point(str(drive)))
