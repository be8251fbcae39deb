"""What is asked of a node becomes a trace that sim reads; a full disk costs lines only."""

import json

import pytest

from holdfast.errors import ConfigError
from holdfast.node.recorder import Asked, Recorder
from holdfast.sim.formats.load import load
from holdfast.wire import messages as m


def test_a_running_node_records_what_sim_reads(start_node, engine, names, tmp_path):
    file = tmp_path / "asked.jsonl"
    node = start_node(record=str(file))
    one = engine(node.address)
    keys = names("chat", 40)
    for turn, tokens in enumerate((20, 30, 40)):
        one.call(m.Cover(b"".join(keys[:tokens]), tokens=tokens * 16 + 3, session=f"s{turn % 2}"))
    one.close()
    assert node.stop() == 0
    assert file.stat().st_mode & 0o777 == 0o600
    trace = load(file)
    assert trace.input_tokens.tolist() == [323, 483, 643]
    assert trace.block_tokens == 16
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.unique == 40


def test_it_ends_where_it_is_told_to_and_counts_what_is_lost(tmp_path):
    file = tmp_path / "asked.jsonl"
    recorder = Recorder(file, most_bytes=200)
    for _ in range(5):
        recorder.note(Asked(1.0, "ff", 16, ["aa"]))
    recorder.close()
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert kept[0] == {"at_s": 1.0, "fingerprint": "ff", "tokens": 16, "keys": ["aa"]}
    assert len(kept) + recorder.lost == 5
    assert file.stat().st_size <= 200


def test_a_file_that_can_not_be_written_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"record: .*nowhere.* can not be written: No such file"):
        Recorder(tmp_path / "nowhere" / "asked.jsonl")
