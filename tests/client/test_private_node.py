import contextlib
import errno
import fcntl
import hashlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.client import private_node
from holdfast.client.private_node import AWAY_S, PrivateNode, _locked
from holdfast.errors import HoldfastError
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import PROTOCOL, Hello, ReportReply, Status


def folder_of(address):
    return Path(address.removeprefix("unix://")).parent


def gone(address, within_s=60.0):
    end_s = time.monotonic() + within_s
    while folder_of(address).exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def test_two_processes_of_one_engine_share_a_node(tmp_path):
    first = PrivateNode("engine", tmp_path)
    second = PrivateNode("engine", tmp_path)
    try:
        assert second.address == first.address
        client = Client(first.address, Hello(PROTOCOL, "test"), 60.0)
        assert client.call(Status(), ReportReply, 60.0).data["blocks"] == 0
        client.close()
        second.close()
        Client(first.address, Hello(PROTOCOL, "test"), 60.0).close()
    finally:
        first.close()
    assert gone(first.address)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def at_once(monkeypatch):
    """A process may start a node again at any time."""
    monkeypatch.setattr(private_node, "RESTART_S", 0.0)


def signal_node(address, number):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address.removeprefix("unix://"))
        found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    os.kill(struct.unpack("3i", found)[0], number)


def kill_node(address):
    """Kill the process of a node, and wait until it is gone."""
    signal_node(address, signal.SIGKILL)
    end_s = time.monotonic() + 60
    with contextlib.suppress(OSError):
        while time.monotonic() < end_s:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(address.removeprefix("unix://"))
            time.sleep(0.02)
        pytest.fail("the node is still there")


@pytest.mark.usefixtures("at_once")
def test_if_the_process_that_started_the_node_ends_another_starts_a_new_one_for_all(tmp_path):
    first, *others = [PrivateNode("engine", tmp_path) for _ in range(3)]
    first.close()
    assert {node.present_address(AWAY_S - 1) for node in others} == {first.address}, "it is early"
    addresses = [node.present_address(AWAY_S) for node in others]
    starter, finder = others
    try:
        assert addresses[0] == addresses[1] != first.address
        finder.close()
        Client(starter.present_address(AWAY_S), Hello(PROTOCOL, "test"), 60.0).close()
    finally:
        starter.close()
    assert gone(starter.address)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("at_once")
def test_a_node_that_is_stopped_is_not_replaced(tmp_path):
    first, second = (PrivateNode("engine", tmp_path) for _ in range(2))
    signal_node(first.address, signal.SIGSTOP)
    try:
        assert second.present_address(AWAY_S) == first.address
    finally:
        signal_node(first.address, signal.SIGCONT)
        first.close()


@pytest.mark.usefixtures("at_once")
def test_a_node_that_was_killed_is_started_anew_by_its_starter(tmp_path, monkeypatch):
    node = PrivateNode("engine", tmp_path)
    killed = node.address
    try:
        kill_node(killed)
        monkeypatch.setattr(private_node, "RESTART_S", 600.0)
        assert node.present_address(AWAY_S) == killed, "it was started a moment ago"
        monkeypatch.setattr(private_node, "RESTART_S", 0.0)
        renewed = node.present_address(AWAY_S)
        assert renewed != killed
        Client(renewed, Hello(PROTOCOL, "test"), 60.0).close()
    finally:
        node.close()
    assert gone(renewed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("at_once")
def test_the_file_of_a_later_node_is_left_by_the_starter_of_the_earlier_one(tmp_path):
    first, second = (PrivateNode("engine", tmp_path) for _ in range(2))
    kill_node(first.address)
    renewed = second.present_address(AWAY_S)
    first.close()
    assert meeting_in(tmp_path).read_text() == renewed
    second.close()


@pytest.mark.usefixtures("at_once")
def test_close_ends_a_node_that_is_being_started(tmp_path, monkeypatch):
    started = tmp_path / "started"
    slow = tmp_path / "slow"
    slow.write_text(
        f"#!/bin/sh\necho $$ > {started}.new; mv {started}.new {started}; exec sleep 600\n"
    )
    slow.chmod(0o700)
    monkeypatch.setattr(private_node, "END_S", 0.1)
    folder = tmp_path / "run"
    first, second = (PrivateNode("engine", folder) for _ in range(2))
    first.close()
    monkeypatch.setattr(sys, "executable", str(slow))
    failures = []

    def look():
        try:
            second.present_address(AWAY_S)
        except HoldfastError as error:
            failures.append(str(error))

    looking = threading.Thread(target=look)
    looking.start()
    while not started.exists():
        assert looking.is_alive()
        time.sleep(0.01)
    second.close()
    looking.join(60)
    assert failures
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert second.present_address(AWAY_S) == first.address, "it starts no node any more"


def test_a_process_with_more_than_a_thousand_descriptors_starts_a_node(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as undo:
        if 0 <= limits[0] < 2048:
            resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
            undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        last = 0
        while last < 1024:
            last = os.open(os.devnull, os.O_RDONLY)
            undo.callback(os.close, last)
        node = PrivateNode("engine", tmp_path)
        undo.callback(node.close)
        assert folder_of(node.address).exists()


def test_a_node_whose_process_cannot_be_started_leaves_no_pipe_open(tmp_path, monkeypatch):
    ends, pipe = [], os.pipe

    def noted():
        ends.extend(pipe())
        return tuple(ends)

    def fail(*_, **__):
        raise OSError(errno.EAGAIN, "no free process")

    monkeypatch.setattr("holdfast.client.private_node.os.pipe", noted)
    monkeypatch.setattr("holdfast.client.private_node.subprocess.Popen", fail)
    with pytest.raises(OSError, match="no free process"):
        PrivateNode("engine", tmp_path)
    assert len(ends) == 2
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_a_runtime_folder_that_others_may_change_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(HoldfastError, match=r"other users may change folder.*XDG_RUNTIME_DIR"):
        PrivateNode("engine", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_engine_has_another_node(tmp_path):
    nodes = [PrivateNode(name, tmp_path) for name in ("one", "two")]
    addresses = {node.address for node in nodes}
    for node in nodes:
        node.close()
    assert len(addresses) == 2


def test_a_node_ends_with_an_engine_that_was_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from holdfast.client.private_node import PrivateNode\n"
        "print(PrivateNode('engine', Path(sys.argv[1])).address, flush=True); time.sleep(600)"
    )
    argv = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as engine:
        address = engine.stdout.readline().strip()
        assert folder_of(address).exists()
        engine.kill()
    assert gone(address)
    after = PrivateNode("engine", tmp_path)
    try:
        assert after.address != address
    finally:
        after.close()


def test_only_stale_files_of_killed_engines_are_removed_by_the_next_engine(tmp_path):
    living = PrivateNode("living", tmp_path)
    (meeting,) = tmp_path.iterdir()
    nowhere = f"unix://{tmp_path}/node.sock"
    said = {
        "engine-dead": nowhere,
        "engine-unwritten": "",
        "engine-young": nowhere,
        "engine-locked": nowhere,
        "engine-unknown": "what is this",
        "notes": nowhere,
    }
    for name, address in said.items():
        (tmp_path / name).write_text(address)
    for path in set(tmp_path.iterdir()) - {tmp_path / "engine-young"}:
        os.utime(path, (1e9, 1e9))
    with (tmp_path / "engine-locked").open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        PrivateNode("other", tmp_path).close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {meeting.name, *said} - {"engine-dead", "engine-unwritten"}
    assert PrivateNode("living", tmp_path).address == living.address
    living.close()


def test_a_process_waiting_for_a_removed_lock_file_locks_its_replacement(tmp_path):
    meeting, found = tmp_path / "engine-x", []

    def wait():
        with _locked(meeting) as file:
            found.append(os.path.samestat(os.fstat(file.fileno()), meeting.stat()))

    with _locked(meeting):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        meeting.unlink()
    waiting.join(60)
    assert found == [True]


def test_the_address_file_and_its_folder_are_private_to_the_user(tmp_path):
    node = PrivateNode("engine", tmp_path / "new")
    try:
        assert os.stat(tmp_path / "new").st_mode & 0o077 == 0  # noqa: PTH116  # mode bits
        (meeting,) = (tmp_path / "new").iterdir()
        assert meeting.stat().st_mode & 0o077 == 0
    finally:
        node.close()


def meeting_in(folder, engine_id="engine"):
    name = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
    return folder / f"engine-{name}"


KEPT = [
    bytes(range(256)) * 64,
    b"[" * 10_000 + b"]" * 10_000,
    b"unix:///run/\0/node.sock",
    b"unix:///" + b"a" * 4_000,
    b"tcp://127.0.0.1:1",
    b"9" * 10_000,
    b"\xff\xfe" * 50,
]


@pytest.mark.parametrize("kept", KEPT, ids=range(len(KEPT)))
def test_an_invalid_stored_address_is_ignored_and_logged(kept, tmp_path, caplog):
    meeting_in(tmp_path).write_bytes(kept)
    node = PrivateNode("engine", tmp_path)
    try:
        client = Client(node.address, Hello(PROTOCOL, "test"), 60.0)
        assert client.call(Status(), ReportReply, 60.0).data["blocks"] == 0
        client.close()
        assert meeting_in(tmp_path).read_text() == node.address
        assert "the stored address of this engine's node is ignored" in caplog.text
    finally:
        node.close()


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "device"])
def test_an_address_path_that_is_no_regular_file_is_refused(kind, tmp_path):
    meeting = meeting_in(tmp_path)
    match kind:
        case "folder":
            meeting.mkdir()
        case "fifo":
            os.mkfifo(meeting)
        case "loop":
            meeting.symlink_to(meeting)
        case "device":
            meeting.symlink_to("/dev/zero")
    with pytest.raises(HoldfastError, match=r"cannot be used: .*; remove it"):
        PrivateNode("engine", tmp_path)
