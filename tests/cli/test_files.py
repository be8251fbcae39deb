"""Files that a command or a configuration names are regular files; others are refused at once."""

import json
import os
import socket

import pytest

from holdfast.cli import USAGE, main

SETTINGS = {
    "domains.a.key_file": "pipe",
    "tokens.key_file": "pipe",
    "http": {"listen": "tcp://127.0.0.1:0", "token_file": "pipe"},
    "record": "pipe",
    "keyring": "pipe",
    "tls": {"cert": "pipe", "key": "pipe", "ca": "pipe"},
    "domains.b.publish_file": "pipe",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a key, and one thing of each kind that is no regular file."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "key").write_bytes(bytes(32))
    (tmp_path / "key").chmod(0o600)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        yield tmp_path


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_pipe_in_a_configuration_is_named_before_the_node_is_ready(holdfast, folder, setting):
    config = {
        "listen": f"unix://{folder}/node.sock",
        "tiers": [{"kind": "host", "capacity": "16 MiB"}],
        "domains": {"b": {"key_file": "key", "public": setting.startswith("domains.b")}},
        "keyring": "ring.json",
    }
    *above, key = setting.split(".")
    section = config
    for name in above:
        section = section.setdefault(name, {})
    section[key] = SETTINGS[setting]
    (folder / "node.yaml").write_text(json.dumps(config))
    done = holdfast("serve", "--config", folder / "node.yaml")
    assert done.returncode == USAGE, done.stderr
    assert "pipe'" in done.stderr
    assert "not a regular file, but a FIFO" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pipe", "a FIFO"),
        ("folder", "a directory"),
        ("device", "a character device"),
        ("socket", "a socket"),
    ],
)
def test_a_configuration_path_that_is_no_regular_file_is_refused(folder, capsys, name, kind):
    assert main(["verify", "--offline", "--config", str(folder / name)]) == USAGE
    error = capsys.readouterr().err
    assert f"{folder / name}: cannot be read: not a regular file, but {kind}; name another" in error


@pytest.mark.parametrize("name", ["pipe", "device", "socket"])
def test_doctor_names_a_record_or_audit_path_that_is_no_regular_file(folder, capsys, name):
    for setting in ("record", "audit"):
        main(["doctor", "--set", f"{setting}={folder / name}", "--json", "-"])
        checks = {each["what"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
        assert "not a regular file" in checks[setting]["why"]


def test_a_path_that_is_not_text_is_shown_as_escapes(holdfast, folder):
    name = os.fsdecode(os.fsencode(folder) + b"/r\x80")
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = holdfast("doctor", "--set", f"record={name}", env=strict)
    assert "Traceback" not in done.stderr
    assert f"{folder}/r\\udc80" in done.stdout


VERBS = [
    ["serve", "--config"],
    ["stats", "--config"],
    ["inspect", "--config"],
    ["inspect", "audit", "--config"],
    ["verify", "--offline", "--config"],
    ["domain", "list", "--config"],
    ["token", "--peer", "a", "--config"],
    ["token", "--peer", "a", "--key-file"],
    ["pool", "drain", "a", "--members"],
    ["sim", "conversation", "--model", "Llama-3.1-8B", "--ladder"],
    ["size", "--model", "Llama-3.1-8B", "--prices"],
    ["size", "--users", "10", "--model"],
]


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_every_command_names_a_pipe_in_the_place_of_a_file(folder, capsys, arguments):
    assert main([*arguments, str(folder / "pipe")]) != 0
    assert "not a regular file, but a FIFO" in capsys.readouterr().err
