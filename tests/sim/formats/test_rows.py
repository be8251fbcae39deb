"""A few bytes of a trace do not ask for more memory than there is."""

import json

import pytest

from holdfast.errors import TraceError
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import BLOCKS_MAX, REQUEST_BLOCKS_MAX, Reading

HEAD = "Timestamp,Request tokens,Response tokens\n"
ONE_TOKEN = Reading(block_tokens=1)


@pytest.fixture
def read(tmp_path):
    """Write a file and load it."""

    def loaded(text, reading=None):
        path = tmp_path / "traffic"
        path.write_text(text)
        return load(path, reading)

    return loaded


def session(*tokens):
    requests = [{"t": at, "in": n, "out": 1, "runs": [[0, n]]} for at, n in enumerate(tokens)]
    return json.dumps({"block_size": 1, "requests": requests}) + "\n"


TOO_MANY = r"traffic:2: 2,147,483,648 blocks; a request has at most 4,194,304; correct or remove"


def test_a_row_above_the_block_limit_of_a_request_is_refused(read):
    with pytest.raises(TraceError, match=TOO_MANY):
        read(f"{HEAD}0,2147483648,5\n1,100,5\n", ONE_TOKEN)


def test_a_run_above_the_block_limit_of_a_request_is_refused(read):
    with pytest.raises(TraceError, match=TOO_MANY):
        read(session(10, 20) + session(2**31))


def test_the_row_that_exceeds_the_block_limit_of_a_trace_is_refused(read):
    rows = BLOCKS_MAX // REQUEST_BLOCKS_MAX + 1
    says = rf"traffic:{rows + 1}: 541,065,216 blocks up to here; a trace has at most 536,870,912;"
    with pytest.raises(TraceError, match=says):
        read(HEAD + f"0,{REQUEST_BLOCKS_MAX},5\n" * rows, ONE_TOKEN)
    with pytest.raises(TraceError, match="traffic:2: 536,870,917 blocks up to here"):
        read(session(5) + session(*[REQUEST_BLOCKS_MAX] * rows))


def test_the_longest_request_is_read(read):
    trace = read(f"{HEAD}0,{REQUEST_BLOCKS_MAX},5\n", ONE_TOKEN)
    assert (trace.requests, trace.blocks) == (1, REQUEST_BLOCKS_MAX)
