"""`holdfast serve`: private nodes end with their parent, mistakes are named, flags count."""

import datetime as dt
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.cli.serve import JsonFormatter, gc_frozen
from holdfast.scratch import NODE
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client


@pytest.fixture
def lifeline():
    """A pipe: the descriptor to watch, and an end whose closing stands for the parent's death."""
    watched, held = os.pipe()
    with os.fdopen(watched, "rb"), os.fdopen(held, "wb") as parent:
        yield watched, parent


def test_a_private_node_ends_with_its_parent_and_leaves_nothing(serving, save, lifeline):
    watched, parent = lifeline
    process, address = serving("--private", "--with-parent", watched, pass_fds=[watched])
    folder = Path(address.removeprefix("unix://")).parent
    assert folder.name.startswith(NODE)
    assert folder.stat().st_mode & 0o777 == 0o700
    save(address, 3).close()
    assert {path.name for path in folder.iterdir()} >= {"disk", "node.sock"}
    parent.close()
    assert process.wait(60) == 0
    assert not folder.exists()


def test_a_private_node_takes_its_tiers_from_the_file(serving, lifeline, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("tiers: [{kind: host, capacity: 32 MiB}]\n")
    argv = ["--private", "--config", file, "--with-parent", lifeline[0]]
    process, address = serving(*argv, pass_fds=[lifeline[0]])
    client = Client(address, m.Hello(m.PROTOCOL, "test"), 60)
    tiers = client.call(m.Status(), m.ReportReply, 60).data["tiers"]
    assert [(t["tier"], t["capacity_bytes"]) for t in tiers] == [("host", 32 << 20)]
    client.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_flags_beat_the_file(serving, tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text("listen: /nowhere/x\ntiers: [{kind: host, capacity: 99 TiB}]\n")
    address = f"unix://{tmp_path}/flag.sock"
    argv = ["--config", file, "--listen", address, "--set", "tiers.0.capacity=16 MiB"]
    assert serving(*argv)[1] == address


def serve_once(file, log, *arguments):
    """Serve until ready, then end the node; return its exit code."""
    command = [sys.executable, "-m", "holdfast", "serve", "--config", str(file), *arguments]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    with process:
        assert process.stdout.readline().startswith(b"READY")
        process.terminate()
        return process.wait(60)


@pytest.fixture
def node_file(tmp_path):
    file = tmp_path / "node.yaml"
    disk = f"{{kind: disk, path: {tmp_path}/disk, capacity: 64 MiB}}"
    file.write_text(
        f"listen: unix://{tmp_path}/n.sock\ntiers: [{{kind: host, capacity: 16 MiB}}, {disk}]\n"
    )
    return file


def test_the_log_begins_with_version_address_tiers_and_recovery(node_file, tmp_path):
    log = tmp_path / "log"
    assert serve_once(node_file, log) == 0
    lines = log.read_text().splitlines()
    assert re.fullmatch(r"\S+ \S+ INFO holdfast\.node\.daemon holdfast .*", lines[0])
    assert f"holdfast {__version__}, process " in lines[0]
    assert f" at unix://{tmp_path}/n.sock" in lines[0]
    assert lines[1].endswith("tier host: capacity 16 MiB")
    assert lines[2].endswith(f"tier disk: path {tmp_path}/disk, capacity 64 MiB")
    assert [line for line in lines if re.search(r"recovered: 0 blocks in \S+ s", line)]


def test_a_log_of_json_has_time_level_logger_and_message(node_file, tmp_path):
    log = tmp_path / "log"
    assert serve_once(node_file, log, "--log-format", "json") == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(line.keys() == {"time", "level", "logger", "message"} for line in lines)
    assert dt.datetime.fromisoformat(lines[0]["time"]).tzinfo is dt.UTC
    assert (lines[0]["level"], lines[0]["logger"]) == ("info", "holdfast.node.daemon")


def test_an_exception_is_one_line_of_json():
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "gone %d", (2,), sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["exception"][-13:]) == ("gone 2", "ValueError: x")


def test_a_log_that_cannot_be_written_ends_nothing(node_file):
    assert serve_once(node_file, Path("/dev/full")) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "tiers.0.capacity"], "--set tiers.0.capacity: is not KEY=VALUE"),
        (["--set", "tiers.0.capacity=900 TiB"], "tiers.0.capacity: 900 TiB given, "),
        (["--set", "lease=3"], "configuration: contains unknown field 'lease'; remove it"),
        (
            ["--config", "/none.yaml"],
            "/none.yaml: cannot be read: No such file or directory; name",
        ),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_starts(holdfast, arguments, words):
    done = holdfast("serve", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_foreign_file_in_the_data_folder_is_refused_and_left_alone(holdfast, tmp_path):
    (tmp_path / "disk").mkdir()
    file = tmp_path / "disk" / "blocks.holdfast"
    file.write_bytes(b"somebody else's " * 4096)
    config = tmp_path / "node.yaml"
    config.write_text(
        f"listen: {tmp_path}/node.sock\n"
        "tiers:\n"
        "  - {kind: host, capacity: 16 MiB}\n"
        f"  - {{kind: disk, path: {tmp_path}/disk, capacity: 16 MiB}}\n"
    )
    done = holdfast("serve", "--config", config)
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert file.read_bytes() == b"somebody else's " * 4096
    assert not (tmp_path / "node.sock").exists()


def test_a_key_descriptor_that_is_not_open_is_refused_with_the_remedy(holdfast, tmp_path):
    config = tmp_path / "node.yaml"
    config.write_text(
        f"listen: unix://{tmp_path}/node.sock\n"
        f"tiers: [{{kind: host, capacity: 16 MiB}}, "
        f"{{kind: disk, path: {tmp_path}/disk, capacity: 16 MiB}}]\n"
        "domains: {acme: {key_fd: 3}}\n"
    )
    words = "domains.acme.key_fd: descriptor 3 is not open; start the node with the key"
    for arguments in (["serve"], ["serve", "--private"], ["verify", "--offline"]):
        if "--offline" in arguments:
            words = "domains.acme.key_fd: descriptor 3 cannot be read: Bad file descriptor; start"
            (tmp_path / "disk").mkdir()
            (tmp_path / "disk" / "blocks.holdfast").touch()
        done = holdfast(*arguments, "--config", config)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "node.sock.lock").exists()


def test_a_key_comes_on_a_descriptor_from_the_shell(serving, tmp_path):
    config, key = tmp_path / "node.yaml", tmp_path / "acme.key"
    key.write_bytes(bytes(32))
    config.write_text(
        f"listen: unix://{tmp_path}/node.sock\ntiers: [{{kind: host, capacity: 16 MiB}}]\n"
        "domains: {acme: {key_fd: %d}}\n"
    )
    with key.open("rb") as opened:
        config.write_text(config.read_text() % opened.fileno())
        serving("--config", config, pass_fds=[opened.fileno()])


def test_a_parent_that_can_not_be_watched_is_refused(holdfast, tmp_path):
    words = "--with-parent: descriptor 77 is not open; start the node with the reading end"
    done = holdfast("serve", "--private", "--with-parent", "77")
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    with (tmp_path / "file").open("wb") as opened:
        fd = opened.fileno()
        done = holdfast("serve", "--private", "--with-parent", fd, pass_fds=[fd])
    assert (done.returncode, "is a file or a folder, not a pipe" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("mode", "token", "words"),
    [(0o644, "0" * 32, "is open to all users; chmod 640 it"), (0o600, "short", "holds 5 bytes")],
)
def test_an_insecure_http_token_is_refused(holdfast, tmp_path, mode, token, words):
    secret, file = tmp_path / "token", tmp_path / "node.yaml"
    secret.write_text(token)
    secret.chmod(mode)
    file.write_text(
        f"listen: unix://{tmp_path}/n.sock\ntiers: [{{kind: host, capacity: 16 MiB}}]\n"
        f"http: {{listen: 'tcp://127.0.0.1:0', token_file: {secret}}}\n"
    )
    done = holdfast("serve", "--config", file)
    assert done.returncode == 2
    assert f"http.token_file: '{secret}' {words}" in done.stderr


def test_gc_frozen_excludes_existing_objects_from_collections():
    before = gc.get_freeze_count()
    ours = [[] for _ in range(100)]
    with gc_frozen():
        assert gc.get_freeze_count() > before
        assert not any(each is ours for each in gc.get_objects())
    assert any(each is ours for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
