"""`holdfast doctor`: what was found, what was chosen, why, and an exit code that can be used."""

import contextlib
import datetime as dt
import json
import os
import re
import socket
import time

import pytest

from holdfast.cli import doctor, main
from holdfast.config import Config
from holdfast.errors import NodeGoneError
from holdfast.keys import keyring_file
from holdfast.probe import free_port
from holdfast.status import (
    EngineLockStatus,
    NodeStatus,
    PageLockStatus,
    SharedTierStatus,
    TierStatus,
)
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.kind import direct_io, nearest
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.pool import kind as pool_kind
from holdfast.version import __version__
from holdfast.wire.local.client import Client
from holdfast.wire.remote.token import VERBS, issue
from holdfast_bench.harness.certificates import Authority


def examined(holdfast, *arguments):
    done = holdfast("doctor", *arguments, "--json", "-")
    report = json.loads(done.stdout)
    return done.returncode, {check["what"]: check for check in report["checks"]}, report


@pytest.fixture
def config(tmp_path):
    def write(host="16 MiB", disk="16 MiB"):
        file = tmp_path / "doctor.yaml"
        file.write_text(
            f"listen: {tmp_path}/node.sock\n"
            "tiers:\n"
            f"  - {{kind: host, capacity: {host}}}\n"
            f"  - {{kind: disk, path: {tmp_path}/new/disk, capacity: {disk}}}\n"
        )
        return file

    return write


def key(folder, byte=0):
    file = folder / f"{byte}.key"
    file.write_bytes(bytes([byte]) * 32)
    file.chmod(0o600)
    return file


def test_doctor_succeeds_on_a_sound_machine_without_a_node(holdfast, config, tmp_path):
    code, checks, report = examined(holdfast, "--config", config())
    assert code == 0
    assert report["version"] == __version__
    assert report["config"]["tiers"][0] == {"kind": "host", "capacity": 16 << 20, "lock": "auto"}
    for what in ("python", "memory", "shared memory", "huge pages", "numa", "process_vm_readv"):
        assert checks[what]["found"]
    assert checks["tiers.1"]["found"] == f"disk, 16 MiB in {tmp_path}/new/disk"
    assert "created at the first start" in checks["tiers.1"]["why"]
    assert checks["tiers.1 direct I/O"]["found"]
    assert checks["node"]["found"] == "no answer"
    assert "`holdfast serve` starts a node" in checks["node"]["why"]
    assert not (tmp_path / "new").exists()


def test_a_disk_tier_larger_than_the_disk_is_a_problem(holdfast, config):
    code, checks, _ = examined(holdfast, "--config", config(disk="900 TiB"))
    assert code == 1
    assert checks["tiers.1"]["ok"] is False
    assert checks["tiers.1"]["why"].endswith("free; lower tiers.1.capacity")


def test_a_configuration_that_can_not_be_used_is_a_problem(holdfast, config):
    code, checks, report = examined(holdfast, "--config", config(host="900 TiB"))
    assert code == 1
    assert "tiers.0.capacity: 900 TiB given" in checks["configuration"]["why"]
    assert report["config"] == {}
    done = holdfast("doctor", "--config", config(host="900 TiB"))
    assert "PROBLEM  configuration" in done.stdout


def test_a_running_node_is_found(holdfast, node, save, tmp_path):
    save(node, 3).close()
    code, checks, _ = examined(holdfast, "--config", tmp_path / "node.yaml")
    assert code == 0
    assert checks["node"]["found"] == f"answers at {node}"
    assert checks["node"]["why"] == "3 blocks"


def test_a_node_that_ends_before_it_answers_is_a_finding(node, tmp_path, monkeypatch, capsys):
    def ended(*_):
        raise NodeGoneError("the connection broke")

    monkeypatch.setattr(Client, "call", ended)
    assert main(["doctor", "--config", str(tmp_path / "node.yaml")]) == 0
    assert re.search("- +node +no answer .the connection broke", capsys.readouterr().out)


def test_versions_are_read_without_importing(holdfast, config):
    _, checks, _ = examined(holdfast, "--config", config())
    assert checks["torch"]["found"].startswith(("torch ", "not installed"))
    assert checks["vllm"]["found"].startswith(("vllm", "not installed"))


def test_direct_io_is_tried_and_leaves_no_file(tmp_path):
    finding = direct_io("direct I/O", str(tmp_path))
    assert finding.ok or finding.found.startswith("refused")
    assert list(tmp_path.iterdir()) == []


def test_direct_io_in_a_folder_that_is_not_there_is_refused(tmp_path):
    finding = direct_io("direct I/O", str(tmp_path / "none"))
    assert finding.found == "refused: No such file or directory"


def test_nearest_returns_the_closest_existing_folder(tmp_path):
    assert nearest(str(tmp_path / "a" / "b")) == str(tmp_path)
    assert nearest(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    "tier", ["kind: valkey, address: {address}", "kind: mooncake, master: {address}"]
)
def test_doctor_checks_whether_an_external_store_can_be_reached(holdfast, config, tmp_path, tier):
    file = config()
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"tcp://127.0.0.1:{there.getsockname()[1]}"
        line = f"  - {{{tier.format(address=address)}}}\n"
        domains = f"domains: {{default: {{key_file: {key(tmp_path)}}}}}\n"
        file.write_text(file.read_text() + line + domains)
        code, checks, _ = examined(holdfast, "--config", file)
        assert code == 0
        assert checks["tiers.2"]["why"] == "can be reached"
    code, checks, _ = examined(holdfast, "--config", file)
    assert code == 1
    assert address in checks["tiers.2"]["found"]
    assert checks["tiers.2"]["why"].endswith("start it, or correct the address")


def test_doctor_reports_which_domains_are_sealed_and_with_which_key_ring(holdfast, tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text(
        f"listen: unix://{tmp_path}/node.sock\n"
        f"tiers: [{{kind: host, capacity: 16 MiB}}, "
        f"{{kind: disk, path: {tmp_path}/disk, capacity: 16 MiB}}]\n"
        f"domains: {{acme: {{key_file: {key(tmp_path)}}}, "
        f"plain: {{key_file: {key(tmp_path, 1)}, seal: false}}}}\n"
    )
    done = holdfast("doctor", "--config", file)
    assert f"acme (key ring {tmp_path}/disk/keyring.json)" in done.stdout


def test_doctor_names_a_key_ring_only_if_a_domain_is_sealed(examined_here, config, tmp_path):
    file = config()
    assert "key ring" not in examined_here("--config", file)[1]
    sealed = f"domains.acme.key_file={key(tmp_path)}"
    assert examined_here("--config", file, "--set", sealed)[1]["key ring"]["ok"]


@pytest.mark.parametrize(
    ("lower_tier", "ok", "found"),
    [(False, None, "no domain"), (True, False, "not possible")],
)
def test_a_missing_sealing_library_is_a_problem_only_if_a_node_would_not_start(
    tmp_path, monkeypatch, capsys, lower_tier, ok, found
):
    monkeypatch.setattr("holdfast.assemble.domains.missing", lambda: "install holdfast-kv[secure]")
    file = tmp_path / "node.yaml"
    disk = f", {{kind: disk, path: {tmp_path}/disk, capacity: 16 MiB}}" if lower_tier else ""
    file.write_text(
        f"listen: unix://{tmp_path}/node.sock\n"
        f"tiers: [{{kind: host, capacity: 16 MiB}}{disk}]\n"
        f"domains: {{acme: {{key_file: {key(tmp_path)}}}}}\n"
    )
    assert main(["doctor", "--config", str(file), "--json", "-"]) == (1 if lower_tier else 0)
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    sealing = checks["sealing"]
    assert (sealing["ok"], sealing["found"]) == (ok, found)
    assert not lower_tier or "install holdfast-kv[secure], or set" in sealing["why"]


@pytest.mark.parametrize(
    ("where", "ok", "words"),
    [
        ("node: any", True, "ordinary memory of any node"),
        ("node: 999", False, "tiers.1.node: node 999 does not exist"),
        ("device: /dev/dax99.9", False, "'/dev/dax99.9' cannot be found"),
        ("device: /dev/zero", False, "'/dev/zero' is not a DAX device"),
    ],
)
def test_doctor_examines_cxl_memory_without_allocating_it(holdfast, tmp_path, where, ok, words):
    file = tmp_path / "cxl.yaml"
    file.write_text(
        f"listen: {tmp_path}/node.sock\n"
        "tiers:\n"
        "  - {kind: host, capacity: 16 MiB}\n"
        f"  - {{kind: cxl, capacity: 32 MiB, {where}}}\n"
    )
    code, checks, _ = examined(holdfast, "--config", file)
    assert code == (0 if ok else 1)
    assert checks["tiers.1"]["found"] == "cxl, 32 MiB"
    assert words in checks["tiers.1"]["why"]


@pytest.mark.parametrize(
    ("setting", "what", "words"),
    [
        ("domains.a.key_file={0}/nope", "keys", "domains.a.key_file: '{0}/nope' cannot be read"),
        ("domains.a.key_fd=77", "keys", "domains.a.key_fd: descriptor 77 is not open; start"),
        ("domains.a.key_file={0}/0.key", "keys", "has the key of domains.b, so they would be one"),
        ("tokens.key_file={0}/nope", "tokens", "tokens.key_file: '{0}/nope' cannot be read"),
        ("record={0}/no/x", "record", "record: '{0}/no/x' cannot be written: there is no folder"),
        ("audit={0}", "audit", "'{0}' cannot be written: it is a folder; name a file in it"),
        ("keyring={0}/0.key", "key ring", "is damaged or not a key ring"),
        ("keyring={0}/no/ring", "key ring", "there is no folder '{0}/no'; create it"),
        ("tiers.1.path={0}/0.key", "tiers.1", "0.key is a file, not a folder; name a folder in"),
        ("domains.b.users.0=no-such-user", "users", "domains.b.users.0: there is no user 'no-su"),
        ("http.token_file={0}/nope", "http.token_file", "http.token_file: '{0}/nope' cannot be"),
        ("tiers.1.capacity=20 MiB", "tiers.1", "; 20971520 bytes are 9 regions of 2097152; set"),
    ],
)
def test_a_setting_that_a_node_refuses_is_a_problem_and_no_file_is_changed(
    holdfast, config, tmp_path, setting, what, words
):
    file, disk = config(), tmp_path / "new" / "disk"
    domains = f"domains: {{b: {{key_file: {key(tmp_path)}}}}}\n"
    http = f"http: {{listen: 'unix://{tmp_path}/http.sock'}}\n"
    file.write_text(file.read_text() + domains + http)
    DiskTier(DiskConfig(path=str(disk), capacity_bytes=16 << 20)).close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    setting, words = setting.format(tmp_path), words.format(tmp_path)
    code, checks, _ = examined(holdfast, "--config", file, "--set", setting)
    assert code == 1
    assert words in checks[what]["why"]
    assert [found["what"] for found in checks.values() if found["ok"] is False] == [what]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    if what != "audit":  # without which a node goes on, and says so each time
        done = holdfast("serve", "--config", file, "--set", setting)
        assert done.returncode == 2, done.stderr


def test_secrets_of_a_public_domain_that_engines_could_use_are_problems(
    examined_here, config, tmp_path
):
    ring, file = tmp_path / "ring.json", key(tmp_path)
    keyring_file.write(ring, {})
    ring.chmod(0o640)
    domain = [f"key_file={file}", "public=true", f"publish_file={file}"]
    settings = [*(f"domains.a.{each}" for each in domain), f"keyring={ring}"]
    options = [word for setting in settings for word in ("--set", setting)]
    code, checks = examined_here("--config", config(), *options)
    assert code == 1
    assert "domains.a.publish_file: " in checks["keys"]["why"]
    assert "has the key of domains.a, which all engines have" in checks["keys"]["why"]
    assert "is open to other users; chmod 600 it" in checks["key ring"]["why"]


def test_a_pipe_is_refused_as_a_key_file(holdfast, config, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    settings = ("domains.a.key_file", "tokens.key_file")
    for setting, what in zip(settings, ("keys", "tokens"), strict=True):
        pipe = f"{setting}={tmp_path}/pipe"
        code, checks, _ = examined(holdfast, "--config", config(), "--set", pipe)
        assert code == 1
        assert "cannot be read: not a regular file, but a FIFO" in checks[what]["why"]


@pytest.fixture
def examined_here(capsys):
    """Run `holdfast doctor` in this process; returns its status and its checks by name."""

    def run(*arguments):
        code = main(["doctor", *map(str, arguments), "--json", "-"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        return code, {check["what"]: check for check in checks}

    return run


@pytest.mark.parametrize(
    ("days", "ok", "warning", "words"),
    [
        ((-90, -3), False, False, "the certificate expired on "),
        ((2, 90), False, False, "the certificate is not valid before "),
        ((-90, 5.5), True, True, ", in 5 days; renew it"),
        ((-90, 60.5), True, False, ", in 60 days"),
    ],
)
def test_doctor_reports_how_long_a_certificate_is_valid(
    examined_here, target_files, days, ok, warning, words
):
    code, checks = examined_here(*target_files(*days))
    assert code == (0 if ok else 1)
    assert words in checks["tls.cert"]["why"]
    assert (checks["tls.cert"]["ok"], checks["tls.cert"]["warning"]) == (ok, warning)
    assert checks["tls.ca"]["ok"]


@pytest.fixture
def target_files(config, tmp_path):
    """Return arguments for a target whose certificate begins and expires in days from now."""

    def make(*days):
        now = dt.datetime.now(dt.UTC)
        span = [now + dt.timedelta(days=each) for each in days]
        files = Authority(tmp_path).issue("node", "127.0.0.1", *span)
        arguments = ["--config", config(), "--set", f"listen=tcp://127.0.0.1:{free_port()}"]
        for name in ("cert", "key", "ca"):
            arguments += ["--set", f"tls.{name}={getattr(files, name)}"]
        return arguments

    return make


def test_a_target_does_not_start_with_an_expired_certificate(holdfast, target_files):
    done = holdfast("serve", *target_files(-90, -3))
    assert done.returncode == 2
    assert re.search(r"tls\.cert: '.*node\.crt': the certificate expired on .*; renew", done.stderr)


@pytest.mark.parametrize(("lifetime_s", "ok"), [(600, True), (60, True), (1, False)])
def test_doctor_reports_how_long_a_token_is_valid(examined_here, config, tmp_path, lifetime_s, ok):
    (file := tmp_path / "token").touch(mode=0o600)
    file.write_text(issue(b"k" * 32, "host-a", VERBS, lifetime_s, time.time() - (not ok) * 5))
    given = ["--set", f"listen=tcp://127.0.0.1:{free_port()}", "--set", f"tokens.file={file}"]
    code, checks = examined_here("--config", config(), *given)
    assert code == (0 if ok else 1)
    assert checks["tokens.file"]["ok"] is ok
    assert checks["tokens.file"]["warning"] is (lifetime_s == 60)
    assert ("make a new one with `holdfast token`" in checks["tokens.file"]["why"]) is not ok


def test_troubles_that_a_running_node_reports_are_problems(monkeypatch):
    status = NodeStatus(
        audit_lost=3,
        tiers=[
            TierStatus("odd", trouble="usage() is of type str, not TierUsage"),
            TierStatus("disk", away="21 s ago: it was detached"),
            TierStatus("full", writes_stopped="9 s ago: No space left on device"),
        ],
        shared={"far": SharedTierStatus(trouble="OSError: no answer")},
    )
    monkeypatch.setattr(doctor, "connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(doctor, "ask_status", lambda _: status)
    problems = {
        each.what: each
        for each in doctor._node(Config(listen="unix:///n", tiers=[]))
        if each.ok is False
    }
    assert problems["audit log"].found == "3 lines could not be written"
    assert problems["tier far"].why.startswith("OSError: no answer; update the package")
    assert problems["tier odd"].why.startswith("usage() is of type str, not TierUsage; update")
    assert problems["tier disk"].why == "21 s ago: it was detached; the node serves without it"
    assert problems["tier full"].why.startswith("9 s ago: No space left on device; check")


def test_doctor_warns_of_records_that_cannot_be_opened_and_says_what_to_restore(monkeypatch):
    tier = TierStatus("disk", unlisted_records=2, unlisted_bytes=2048)
    monkeypatch.setattr(doctor, "connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(doctor, "ask_status", lambda _: NodeStatus(tiers=[tier]))
    found = {each.what: each for each in doctor._node(Config(listen="unix:///n", tiers=[]))}
    assert found["tier disk"].found == "cannot open or read 2 records, 2 KiB"
    assert "restore the `keyring` file" in found["tier disk"].why
    assert found["tier disk"].warning


def test_doctor_says_which_engine_cannot_lock_memory_and_what_to_set(monkeypatch):
    locks = PageLockStatus([EngineLockStatus("vllm", failure="ENOMEM; raise memlock")])
    monkeypatch.setattr(doctor, "connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(doctor, "ask_status", lambda _: NodeStatus(page_locks=locks))
    found = {each.what: each for each in doctor._node(Config(listen="unix:///n", tiers=[]))}
    assert found["page locks"].why == "ENOMEM; raise memlock"
    assert found["page locks"].warning
    assert found["page locks"].ok, "it copies, more slowly"


@pytest.mark.parametrize(
    ("lock", "found", "why"),
    [
        ("off", "tiers.0.lock: off", "set tiers.0.lock to auto"),
        ("auto", "up to all that is not reserved", "memlock"),
        ("12 MiB", "up to 12 MiB a domain", "memlock"),
    ],
)
def test_doctor_says_how_much_memory_engines_may_lock(examined_here, config, lock, found, why):
    _, checks = examined_here("--config", config(), "--set", f"tiers.0.lock={lock}")
    assert checks["page locks"]["found"] == found
    assert why in checks["page locks"]["why"]


@pytest.mark.parametrize(
    ("settings", "stay", "warns"),
    [
        (["durable_days=10"], "files1 for 7 days", True),
        (["durable=files1"], "files1 for 7 days", True),
        (["durable_days=7"], "files1 for 7 days", False),
        (["durable=disk"], "disk for 30 days", False),
        (["durable=files1", "tiers.2.keep=30d"], "files1 for 30 days", False),
    ],
)
def test_doctor_warns_if_the_durable_tier_deletes_contexts_before_their_time(
    examined_here, config, tmp_path, settings, stay, warns
):
    file, shared = config(), tmp_path / "shared"
    shared.mkdir()
    file.write_text(
        f"{file.read_text()}"
        f"  - {{kind: files, path: {shared}/holdfast, capacity: 1 GiB}}\n"
        f"domains:\n  default: {{key_file: {key(tmp_path)}}}\n"
    )
    options = [word for setting in settings for word in ("--set", setting)]
    code, checks = examined_here("--config", file, *options)
    assert code == 0
    assert checks["durable"]["warning"] is warns
    assert ("written 7 days before" in checks["durable"]["why"]) is warns
    assert ("set tiers.2.keep to 30d" in checks["durable"]["why"]) is warns
    assert f"stay on {stay}" in checks["durable"]["found"]


def test_doctor_names_no_keep_that_is_too_short_for_the_durable_days(
    examined_here, config, tmp_path
):
    file, shared = config(), tmp_path / "shared"
    shared.mkdir()
    file.write_text(
        f"{file.read_text()}"
        f"  - {{kind: files, path: {shared}/holdfast, capacity: 1 GiB, keep: 30d}}\n"
        f"domains:\n  default: {{key_file: {key(tmp_path)}}}\n"
    )
    _, checks = examined_here("--config", file, "--set", "durable_days=60")
    assert checks["durable"]["warning"]
    assert "keep to" not in checks["durable"]["why"]
    assert "lower durable_days to 30 or less" in checks["durable"]["why"]


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        (["domains.a.seal=true"], True),
        ([], False),
        (["domains.a.seal=true", "listen=tcp://127.0.0.1:0"], False),
    ],
)
def test_doctor_warns_of_seal_on_a_node_whose_blocks_stay_in_memory(
    examined_here, tmp_path, settings, warns
):
    file = tmp_path / "memory.yaml"
    file.write_text(
        f"listen: {tmp_path}/node.sock\ntiers: [{{kind: host, capacity: 16 MiB}}]\n"
        f"domains: {{a: {{key_file: {key(tmp_path)}}}}}\n"
    )
    options = [word for setting in settings for word in ("--set", setting)]
    code, checks = examined_here("--config", file, *options)
    assert code == 0
    assert checks["sealing"]["warning"] is warns
    assert ("seal: true of a has no effect" in checks["sealing"]["why"]) is warns


def test_doctor_does_not_warn_of_defaults_that_fit_if_nothing_is_saved_as_durable(
    examined_here, config, tmp_path
):
    file = config()
    text = f"{file.read_text()}  - {{kind: files, path: {tmp_path}/shared, capacity: 1 GiB}}\n"
    file.write_text(f"{text}domains:\n  default: {{key_file: {key(tmp_path)}}}\n")
    _, checks = examined_here("--config", file)
    assert not checks["durable"]["warning"]
    assert checks["durable"]["found"] == "contexts saved as durable stay on files1 for 7 days"
    assert "set tiers.2.keep to 30d" in checks["durable"]["why"]
    assert "if you save contexts as durable" in checks["durable"]["why"]


@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "empty"])
def test_doctor_leaves_a_shared_folder_as_it_was(examined_here, config, tmp_path, is_there):
    file, shared = config(), tmp_path / "mount" / "shared"
    shared.parent.mkdir()
    if is_there:
        shared.mkdir()
    text = f"{file.read_text()}  - {{kind: files, path: {shared}, capacity: 1 GiB}}\n"
    file.write_text(f"{text}domains:\n  default: {{key_file: {key(tmp_path)}}}\n")
    before = sorted(shared.parent.rglob("*"))
    _, checks = examined_here("--config", file)
    assert checks["tiers.2"]["why"] == "can be read and written"
    assert sorted(shared.parent.rglob("*")) == before


def test_certificates_for_other_stores_and_for_etcd_are_examined_too(
    examined_here, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(pool_kind, "LIST_S", 0.1)
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=3)
    files = Authority(tmp_path).issue("node", expires=past)
    tls = f"tls_ca: {files.ca}, tls_cert: {files.cert}, tls_key: {files.key}"
    etcd = f"etcd://127.0.0.1:1/pool?ca={files.ca}&cert={files.cert}&key={files.key}"
    file = config()
    file.write_text(
        f"{file.read_text()}  - {{kind: valkey, address: 'tcp://127.0.0.1:1', {tls}}}\n"
        f"  - {{kind: pool, members: '{etcd}'}}\n"
        f"domains: {{default: {{key_file: {key(tmp_path)}}}}}\n"
    )
    code, checks = examined_here("--config", file)
    assert code == 1
    for at in ("tiers.2.tls_", "tiers.3.members "):
        assert checks[f"{at}ca"]["ok"]
        assert "the certificate expired on " in checks[f"{at}cert"]["why"]


def test_doctor_warns_if_hosts_do_not_accept_a_targets_certificate(
    examined_here, target_files, tmp_path
):
    arguments = target_files(-90, 90)
    assert not examined_here(*arguments)[1]["tls"]["warning"]
    Authority(tmp_path).issue("node", "10.0.0.7")  # of another authority, which is in tls.ca now
    code, checks = examined_here(*arguments)
    assert code == 0
    assert "with the same tls.ca do not accept it: IP address mismatch" in checks["tls"]["why"]
    (tmp_path / "later").mkdir()
    Authority(tmp_path / "later").file.rename(tmp_path / "ca.pem")
    code, checks = examined_here(*arguments)
    assert checks["tls"]["warning"]
    assert "(unknown authority)" in checks["tls"]["why"]
