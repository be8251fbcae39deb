"""Records of a file are lines, entries of a list, or indented objects; what is wrong is named."""

import json

import pytest

from holdfast.errors import TraceError
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading

ROWS = [{"timestamp": 1000 * n * n, "input_length": 1024, "hash_ids": [1, n]} for n in (2, 3, 4, 5)]
SESSION = {
    "block_size": 64,
    "requests": [
        {"t": 0, "in": 128, "out": 5, "hash_ids": [1, 2]},
        {"t": 9, "in": 192, "out": 5, "hash_ids": [1, 2, 3]},
    ],
}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\n".join(json.dumps(row, indent=2) for row in ROWS),
        "[\n" + ",\n".join(json.dumps(row) for row in ROWS) + "\n]\n",
    ],
    ids=["list", "indented list", "indented objects", "line a row"],
)
def test_json_lists_and_indented_json_load_like_json_lines(loaded, text):
    trace = loaded(text)
    assert trace.time_s.tolist() == [0, 5, 12, 21]
    bad = text.replace("[1, 5]", '"x"').replace("1,\n      5\n", '"x"\n').replace(
        "1,\n    5\n", '"x"\n'
    )  # fmt: skip
    with pytest.raises(TraceError, match=r"jsonl:\d+: Expected"):
        loaded(bad)


def test_a_wrong_entry_of_a_list_is_named_with_its_line(loaded):
    rows = [json.dumps(row) for row in ROWS]
    rows[2] = rows[2].replace("1024", '"many"')
    with pytest.raises(TraceError, match="jsonl:4: Expected `int`"):
        loaded("[\n" + ",\n".join(rows) + "\n]")


def test_a_folder_of_indented_sessions_is_read(tmp_path):
    for n in range(3):
        (tmp_path / f"trace_{n}.json").write_text(json.dumps(SESSION, indent=2))
    trace = load(tmp_path, Reading(window_s=0.0))
    assert (trace.requests, trace.unique) == (6, 9)


ONE, OTHER = json.dumps(ROWS[0]), json.dumps(ROWS[1])
CSV = "Timestamp,Request tokens,Response tokens,Log\n1,5,6,a\n"


@pytest.mark.parametrize(
    ("text", "message", "cut"),
    [
        (ONE + '\n{"timestamp": 5,\n"input_length": 3}\n', "each record on one line", False),
        (ONE + '\n{"timestamp": 5, "inp', "is the file cut", True),
        (json.dumps(ROWS)[:-9], "is the file cut", True),
        (ONE + OTHER + "\n", "trailing characters", False),
        (ONE + "\n{'timestamp': 5}\n", "malformed", False),
        (CSV + "2,5,6\n", "3 cells under 4 columns: is the file cut", True),
        (CSV + "2,5,6\n3,5,6,b\n", "3 cells under 4 columns; correct", False),
        (CSV + '2,5,6,"a,b"\n', "a quoted comma is not supported", False),
        (CSV + '2,5,6,"a\nb"\n', "quoted line break", False),
        (CSV + '2,5,"6\n', "a quoted line break is not supported", False),
        (CSV + "2,5,6,7,8\n", "a cell has a comma in it", False),
    ],
)
def test_only_an_error_at_the_end_of_a_file_suggests_truncation(loaded, text, message, cut):
    with pytest.raises(TraceError, match=message) as refused:
        loaded(text)
    assert ("cut" in str(refused.value)) is cut
