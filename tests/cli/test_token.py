"""`holdfast token`: a line for one bearer, or a file that only its owner reads."""

import json
import time

import pytest

from holdfast.cli import USAGE, main
from holdfast.wire.remote import token

KEY = bytes(range(32))


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_bytes(KEY)
    return str(file)


def test_the_printed_token_is_verified_by_its_key(key_file, capsys):
    assert main(["token", "--key-file", key_file, "--peer", "a", "--may", "read"]) == 0
    held = token.read(capsys.readouterr().out)
    known = token.check(KEY, held.text, time.time())
    assert known == held
    assert (held.claims.peer, held.claims.may) == ("a", ("read",))


def test_the_output_file_is_replaced_atomically(key_file, tmp_path, capsys):
    out = tmp_path / "token"
    out.write_text("the last one")
    assert main(["token", "--key-file", key_file, "--out", str(out), "--lifetime", "60"]) == 0
    assert token.read(out.read_text()).claims.may == token.VERBS
    assert out.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "token"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lifetime", "601"], "a lifetime of 601 s is not above 0 and at most 600 s"),
        (["--key-file", "/nowhere"], "tokens.key_file: '/nowhere' cannot be read"),
        (["--out", "/nowhere/token"], "--out: '/nowhere/token' cannot be written"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(key_file, capsys, arguments, words):
    assert main(["token", "--key-file", key_file, *arguments]) == USAGE
    assert f"holdfast token: {words}" in capsys.readouterr().err


def test_a_missing_key_is_refused_with_the_option_to_add(tmp_path, capsys):
    file = tmp_path / "node.yaml"
    file.write_text("tiers: [{kind: host, capacity: 16 MiB}]")
    assert main(["token", "--config", str(file)]) == USAGE
    assert "token: no key to make a token with; name one with --key-file" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["environment", "flag", "file", "key file"])
def test_a_token_of_the_configured_key_is_in_the_audit_log(
    key_file, tmp_path, monkeypatch, capsys, by
):
    log, key = f"audit={tmp_path}/audit.jsonl", f"tokens.key_file={key_file}"
    arguments = ["token", "--peer", "host-7", "--set", log]
    if by == "environment":
        monkeypatch.setenv("HOLDFAST__TOKENS__KEY_FILE", key_file)
    elif by == "flag":
        arguments += ["--set", key]
    elif by == "key file":
        arguments += ["--key-file", key_file]
    else:
        config = tmp_path / "node.yaml"
        config.write_text("tiers: [{kind: host, capacity: 16 MiB}]")
        arguments += ["--config", str(config), "--key-file", key_file]
    assert main(arguments) == 0
    assert token.read(capsys.readouterr().out).claims.peer == "host-7"
    [line] = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["peer"] == "host-7"


def test_a_token_of_a_key_without_a_configuration_is_in_no_audit_log(key_file, tmp_path, capsys):
    assert main(["token", "--key-file", key_file]) == 0
    assert capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_token_that_cannot_be_written_leaves_no_file(key_file, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main(["token", "--key-file", key_file, "--out", str(tmp_path / "out")]) == USAGE
    assert "cannot be written: Is a directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "out"]
