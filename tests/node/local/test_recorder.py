"""What is asked of a node becomes a trace that sim reads; a full disk costs lines only."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.node.local.recorder import RecordedRequest, RequestRecorder
from holdfast.sim.formats.load import load
from holdfast.wire.local import messages as m


def test_a_node_records_requests_that_sim_can_read(start_node, engine, names, tmp_path):
    file = tmp_path / "asked.jsonl"
    node = start_node(record=str(file))
    one = engine(node.address)
    keys = names("chat", 40)
    for number, tokens in enumerate((20, 30, 40)):
        one.call(m.Cover(b"".join(keys[:tokens]), tokens=tokens * 16 + 3, session=f"s{number % 2}"))
    one.close()
    assert node.stop() == 0
    assert file.stat().st_mode & 0o777 == 0o600
    trace = load(file)
    assert trace.input_tokens.tolist() == [323, 483, 643]
    assert trace.block_tokens == 16
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.unique == 40


def test_the_recorder_stops_at_its_size_limit_and_logs_lost_requests(tmp_path, caplog):
    file = tmp_path / "asked.jsonl"
    recorder = RequestRecorder(file, most_bytes=200)
    for _ in range(5):
        recorder.note(RecordedRequest(1.0, "ff", 16, ["aa"]))
    recorder.close()
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert kept[0] == {"at_s": 1.0, "fingerprint": "ff", "tokens": 16, "keys": ["aa"]}
    assert len(kept) + recorder.lost == 5
    assert file.stat().st_size <= 200
    assert [record.getMessage() for record in caplog.records] == [
        (
            "record: the file has reached its limit of 200 bytes; requests are not recorded any "
            "more, until the node is started with another file"
        ),
        f"record: {recorder.lost} requests were not recorded",
    ]


def test_recording_ends_at_the_first_line_that_does_not_fit(tmp_path):
    file = tmp_path / "asked.jsonl"
    recorder = RequestRecorder(file, most_bytes=200)
    for blocks in (1, 20, 1):
        recorder.note(request(0, blocks))
    recorder.close()
    assert len(file.read_text().splitlines()) == 1
    assert recorder.lost == 2


def test_a_file_that_can_not_be_written_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"record: .*nowhere.* cannot be written: No such file"):
        RequestRecorder(tmp_path / "nowhere" / "asked.jsonl")


def request(number, blocks=20):
    keys = [f"{number:08x}{block:08x}" for block in range(blocks)]
    return RecordedRequest(float(number), "ff", 16 * blocks + 3, keys)


def record(file, *numbers):
    recorder = RequestRecorder(file)
    for number in numbers:
        recorder.note(request(number))
    recorder.close()
    assert not recorder.lost


FULL_DISK = """
import resource, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_recorder import RequestRecorder, request

def note(number):
    before = recorder._left, recorder.lost
    recorder.note(request(number, blocks=500))
    while (recorder._left, recorder.lost) == before:  # until it is written, or lost
        time.sleep(0.001)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
recorder = RequestRecorder(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, resource.RLIM_INFINITY))
for number in range(4):
    note(number)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
for number in range(4, 7):
    note(number)
recorder.close()
print(recorder.lost)
"""


def test_a_line_truncated_by_a_full_disk_is_removed(tmp_path):
    """As a limit on the file's size: a short write, then an error."""
    file, here = tmp_path / "asked.jsonl", Path(__file__).parent
    told = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(file), str(here)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert int(told.stdout) == 2
    assert load(file).time_s.tolist() == [0.0, 1.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("left", [b"", b"{", b'{"at_s":2.0,"fing', b"\0" * 5000])
def test_a_line_left_unfinished_by_a_power_failure_is_removed(tmp_path, left):
    file = tmp_path / "asked.jsonl"
    record(file, 0, 1)
    with file.open("ab") as end:
        end.write(left)
    record(file, 3, 4)
    assert load(file).time_s.tolist() == [0.0, 1.0, 3.0, 4.0]


def test_a_long_unfinished_line_is_removed_completely(tmp_path):
    file = tmp_path / "asked.jsonl"
    record(file, 0)
    whole = file.stat().st_size
    recorder = RequestRecorder(file)
    recorder.note(request(1, blocks=10_000))
    recorder.close()
    os.truncate(file, file.stat().st_size - 9)
    assert file.stat().st_size - whole > 128 << 10
    record(file, 2)
    assert load(file).time_s.tolist() == [0.0, 2.0]


def test_a_complete_line_without_a_newline_is_kept(tmp_path):
    file = tmp_path / "asked.jsonl"
    record(file, 0, 1)
    os.truncate(file, file.stat().st_size - 1)
    record(file, 2)
    assert load(file).time_s.tolist() == [0.0, 1.0, 2.0]


def test_an_unfinished_line_of_a_foreign_file_is_kept(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("first\nlast")
    record(file, 0)
    assert file.read_text().startswith('first\nlast\n{"at_s":0.0')


def test_a_full_disk_does_not_keep_a_recorder_from_closing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        recorder = RequestRecorder(tmp_path / "asked.jsonl")
        recorder.note(request(0))
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorder.lost == 1


def test_an_error_while_closing_the_recorder_is_logged(tmp_path, caplog):
    recorder = RequestRecorder(tmp_path / "asked.jsonl")
    os.close(recorder._file.fileno())
    recorder.close()
    assert "record: lines may be lost, the file did not close: " in caplog.text
