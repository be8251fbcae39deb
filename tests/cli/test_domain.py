"""`holdfast domain` against a running node: what is erased is gone, for good, and logged."""

import json
import os
import pty
import subprocess
import sys

import msgspec
import pytest

from holdfast.cli import main
from holdfast.cli.domain import _text
from holdfast.keys.audit import AuditLog
from holdfast.testing.payloads import payload_of
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

FINGERPRINT = b"fingerprint-16-b"
PAYLOAD_BYTES = 4096
KEYS = [bytes([i]) * 16 for i in range(4)]

YAML = """\
listen: unix://{0}/node.sock
tiers:
  - {{kind: host, capacity: 16 MiB}}
  - {{kind: disk, path: {0}/disk, capacity: 16 MiB}}
domains:
  acme: {{key_file: {0}/acme.key}}
  globex: {{key_command: [cat, {0}/globex.key]}}
"""


@pytest.fixture
def config(tmp_path):
    for name in ("acme", "globex"):
        key = tmp_path / f"{name}.key"
        key.write_bytes(name[:1].encode() * 32)
        key.chmod(0o600)
    file = tmp_path / "node.yaml"
    file.write_text(YAML.format(tmp_path))
    return file


class Engine:
    """A client in one domain, with the arena that it was lent."""

    def __init__(self, address, domain):
        hello = m.Hello(m.PROTOCOL, "test", FINGERPRINT, PAYLOAD_BYTES, 16, domain)
        self.client = Client(address, hello, 60)

    def save(self):
        reserved = self.client.call(m.Reserve(b"".join(KEYS), FINGERPRINT, 0), m.Reserved, 60)
        for key, place in zip(KEYS, reserved.places, strict=True):
            at = place + 128
            self.client.arena.view[at : at + PAYLOAD_BYTES] = payload_of(key, PAYLOAD_BYTES)
        return self.client.call(m.Commit(reserved.ticket), m.Committed, 60).blocks

    def fetch(self):
        fetched = self.client.call(m.Fetch(b"".join(KEYS), 60.0), m.Fetched, 60)
        for key, place in zip(KEYS, fetched.places, strict=False):
            at = place + 128
            found = bytes(self.client.arena.view[at : at + PAYLOAD_BYTES])
            assert found == bytes(payload_of(key, PAYLOAD_BYTES))
        return fetched

    def blocks(self):
        return len(self.fetch().places)


@pytest.fixture
def engine():
    made = []

    def make(address, domain):
        made.append(Engine(address, domain))
        return made[-1]

    yield make
    for each in made:
        each.client.close()


def saved(address, domain):
    client = Client(address, m.Hello(m.PROTOCOL, "test"), 60)
    while client.call(m.Status(), m.ReportReply, 60).data["waiting_to_write"]:
        pass
    client.close()


def test_domains_are_listed_rotated_and_erased(holdfast, serving, engine, config, tmp_path):
    process, address = serving("--config", config)
    acme = engine(address, "acme")
    assert acme.save() == 4
    saved(address, "acme")
    image = (tmp_path / "disk" / "blocks.holdfast").read_bytes()
    assert all(bytes(payload_of(key, PAYLOAD_BYTES))[:64] not in image for key in KEYS)

    done = holdfast("domain", "rotate", "acme", "--config", config)
    assert done.returncode == 0, done.stderr
    assert "epoch 2 seals from now on" in done.stdout
    assert acme.blocks() == 4
    listed = json.loads(holdfast("domain", "--config", config, "--json", "-").stdout)
    entries = {entry["domain"]: entry for entry in listed["domains"]}
    assert [each["epoch"] for each in entries["acme"]["epochs"]] == [1, 2]
    assert (entries["globex"]["sealed"], entries["default"]["sealed"]) == (True, False)

    lease = acme.fetch().lease
    done = holdfast("domain", "erase", "acme", "--yes", "--config", config, "--json", "-")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["blocks"], answer["epochs"], answer["everywhere"]) == (4, 2, True)
    assert not acme.client.call(m.Release(lease), m.Released, 60).valid
    assert acme.blocks() == 0
    assert bytes(acme.client.arena.view[:PAYLOAD_BYTES]) == bytes(PAYLOAD_BYTES)

    process.kill()
    process.wait()
    (tmp_path / "disk" / "blocks.holdfast").write_bytes(image)  # from a backup
    _, address = serving("--config", config)
    again = engine(address, "acme")
    assert again.blocks() == 0
    assert again.save() == 4
    assert again.blocks() == 4
    log = [
        json.loads(line) for line in (tmp_path / "disk" / "audit.jsonl").read_text().splitlines()
    ]
    assert [line["action"] for line in log] == ["key", "key", "rotate", "erase"]


def test_an_ambiguous_or_unknown_domain_is_refused_with_a_reason(
    holdfast, serving, engine, config, tmp_path
):
    process, address = serving("--config", config)
    for words, code, said in (
        (("erase",), 2, "erase: name one domain"),
        (("list", "acme"), 2, "list: shows all domains; name none"),
        (("erase", "nobody"), 4, "domains: 'nobody' is not configured; known: acme, globex"),
        (("erase", "default"), 4, "domain 'default' is not sealed, so it has no data keys"),
    ):
        done = holdfast("domain", *words, "--config", config)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    with pytest.raises(Exception, match="'nobody' is not configured"):
        engine(address, "nobody")
    process.terminate()
    process.wait()
    assert "asked for domain 'nobody'" in (tmp_path / "disk" / "audit.jsonl").read_text()


def test_inspect_audit_verifies_the_chain_of_the_audit_log(holdfast, serving, config, tmp_path):
    assert holdfast("inspect", "audit", "--config", config).returncode == 2
    serving("--config", config)
    done = holdfast("inspect", "audit", "--config", config)
    assert done.returncode == 0, done.stderr
    assert "; the chain is whole" in done.stdout
    file = tmp_path / "disk" / "audit.jsonl"
    file.write_text(file.read_text().replace("globex", "nobody"))
    done = holdfast("inspect", "audit", "--config", config)
    assert done.returncode == 1
    assert "line 2 was changed" in done.stdout


def test_the_named_audit_log_is_checked_and_not_the_configured_one(tmp_path, capsys):
    ours, theirs = tmp_path / "audit.jsonl", tmp_path / "copy.jsonl"
    for file in (ours, theirs):
        for peer in ("a", "b"):
            AuditLog(file).record("token", peer=peer)
    configured = ["--set", f"audit={ours}", "--json", "-"]
    assert main(["inspect", "audit", str(theirs), *configured]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(theirs)
    theirs.write_text(theirs.read_text().replace('"a"', '"c"'))
    assert main(["inspect", "audit", str(theirs), *configured]) == 1
    assert json.loads(capsys.readouterr().out)["faults"]
    assert main(["inspect", "audit", *configured]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(ours)


def test_an_audit_log_that_cannot_be_read_is_wrong_usage(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for arguments, why in (
        ([str(tmp_path / "none")], "No such file or directory; name an audit log"),
        ([str(tmp_path)], "cannot be read: "),
        ([str(tmp_path / "pipe")], "not a regular file, but a FIFO; name an audit log"),
        ([str(tmp_path / "none"), "--node", "unix:///n"], "not a node; remove --node"),
    ):
        assert main(["inspect", "audit", *arguments]) == 2
        assert why in capsys.readouterr().err


def test_an_issued_token_is_recorded_in_the_audit_log(holdfast, config, tmp_path):
    (tmp_path / "disk").mkdir()
    done = holdfast(
        "token", "--config", config, "--key-file", tmp_path / "acme.key", "--peer", "h1"
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "disk" / "audit.jsonl").read_text()
    assert '"action":"token","peer":"h1"' in log
    assert done.stdout.split(".")[2].strip() not in log


def test_reports_of_domain_actions_state_correct_numbers():
    assert _text("retire", {"domain": "a", "retired": 0}) == (
        "a: nothing destroyed, the newest data key is the only one"
    )
    assert "a: 1 data key destroyed" in _text("retire", {"domain": "a", "retired": 1, "blocks": 0})
    disk = {"disk": {"blocks": 2, "bytes": 8192}}
    erased = {"domain": "a", "epochs": 1, "blocks": 2, "tiers": disk, "everywhere": True}
    told = "a: 1 data key destroyed, 2 blocks gone: 2 blocks on disk (8 KiB)"
    assert _text("erase", erased) == told
    entry = {"domain": "a", "id": "00", "sealed": True, "derived": False, "erasures": 1}
    answer = {"keyring": "", "domains": [{**entry, "configured": True, "epochs": []}]}
    assert _text("list", answer).startswith("key ring: in memory\n")
    assert _text("list", answer).endswith(", erased 1 time")
    plain = {"keyring": "", "domains": [{**answer["domains"][0], "sealed": False}]}
    assert _text("list", plain).startswith("key ring: none, because no domain is sealed\n")


def test_a_domain_with_derived_keys_is_not_erased_or_retired_without_a_key_ring(
    holdfast, serving, config, tmp_path
):
    (tmp_path / "members.yaml").write_text("members: [{id: a, address: 'tcp://127.0.0.1:9'}]\n")
    config.write_text(
        f"listen: unix://{tmp_path}/node.sock\n"
        "tiers:\n"
        "  - {kind: host, capacity: 16 MiB}\n"
        f"  - {{kind: pool, members: {tmp_path}/members.yaml}}\n"
        f"domains: {{default: {{key_file: {tmp_path}/acme.key}}}}\n"
    )
    serving("--config", config)
    for action, code, said in (
        ("erase", 4, "without a keyring file this node would not remember that it was erased"),
        ("retire", 0, "default: nothing destroyed, the newest data key is the only one"),
        ("rotate", 0, "epoch 2 seals from now on"),
        ("retire", 4, "keys are derived from the domain's key in epoch 1, so they cannot be"),
    ):
        done = holdfast("domain", action, "default", "--config", config)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr
    done = holdfast("inspect", "--config", config)
    assert "  pool     shared: `holdfast inspect pool` shows its members; " in done.stdout


def on_a_terminal(*arguments, answer):
    """Run `holdfast ARGUMENTS` on a terminal where a user types an answer; return code and text."""
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    argv = [sys.executable, "-m", "holdfast", *map(str, arguments)]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            shown = b""
            try:
                while part := screen.read(4096):
                    shown += part
            except OSError:  # the terminal's other end is closed
                pass
        return process.returncode, shown.decode()


def listed(holdfast, config):
    return json.loads(holdfast("inspect", "--config", config, "--json", "-").stdout)


def test_retire_reports_blocks_that_become_unreadable_and_needs_confirmation(
    holdfast, serving, engine, config
):
    process, address = serving("--config", config)
    engine(address, "acme").save()
    saved(address, "acme")
    process.terminate()
    process.wait()
    _, address = serving("--config", config)  # nothing is in memory
    while listed(holdfast, config)["status"]["recovery_s"] is None:
        pass
    assert holdfast("domain", "rotate", "acme", "--config", config).returncode == 0
    done = holdfast("domain", "retire", "acme", "--config", config)
    assert done.returncode == 4
    assert "1 data key would be destroyed; copies of 4 blocks on disk (32 KiB) are" in done.stderr
    assert "become unreadable; nothing was changed; there is no terminal" in done.stderr
    code, shown = on_a_terminal("domain", "retire", "acme", "--config", config, answer="n\n")
    assert (code, "retire the old data keys of acme? [y/N]" in shown) == (4, True)
    assert engine(address, "acme").blocks() == 4
    assert holdfast("inspect", "drop", "--all", "--config", config).returncode == 4
    client = Client(address, m.Hello(m.PROTOCOL, "test"), 60)
    drop = client.call(m.Drop("*", "preview"), m.ReportReply, 60).data
    assert drop["blocks"][0]["blocks"] == 4
    client.close()


def test_blocks_unreadable_after_retire_are_neither_listed_nor_planned(
    holdfast, serving, engine, config, tmp_path
):
    process, address = serving("--config", config)
    engine(address, "acme").save()
    saved(address, "acme")
    process.terminate()
    process.wait()
    _, address = serving("--config", config)
    while listed(holdfast, config)["status"]["recovery_s"] is None:
        pass
    holdfast("domain", "rotate", "acme", "--config", config)
    acme = engine(address, "acme")
    assert acme.client.call(m.Cover(b"".join(KEYS)), m.Covered, 60).blocks == 4
    done = holdfast("domain", "retire", "acme", "--yes", "--config", config, "--json", "-")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["retired"], answer["blocks"], answer["lost"]) == (1, 4, 4)
    assert answer["tiers"] == {"disk": {"blocks": 4, "bytes": 32768}}
    answer = listed(holdfast, config)
    assert (answer["blocks"], answer["status"]["blocks"]) == ([], 0)
    disk = next(tier for tier in answer["status"]["tiers"] if tier["tier"] == "disk")
    assert disk["records"] == 0
    assert acme.client.call(m.Cover(b"".join(KEYS)), m.Covered, 60).blocks == 0
    assert "copies that cannot be opened left the index blocks=4 disk_blocks=4" in (
        (tmp_path / "serve1.log").read_text()
    )
    assert acme.save() == 4
    assert acme.blocks() == 4


def test_erase_asks_for_confirmation(holdfast, serving, engine, config):
    _, address = serving("--config", config)
    acme = engine(address, "acme")
    acme.save()
    saved(address, "acme")
    done = holdfast("domain", "erase", "acme", "--config", config)
    assert done.returncode == 4
    assert "4 blocks become unreadable: 4 blocks on host (32 KiB), 4 blocks on disk" in done.stderr
    assert acme.blocks() == 4
    code, shown = on_a_terminal("domain", "erase", "acme", "--config", config, answer="y\n")
    assert code == 0, shown
    assert "1 data key destroyed, 4 blocks gone" in shown
    assert acme.blocks() == 0


def test_requests_without_a_step_are_encoded_as_in_older_versions():
    assert b"step" not in msgspec.msgpack.encode(m.Domains("rotate", "acme"))
    assert b"step" not in msgspec.msgpack.encode(m.Drop("*"))
