"""Files of traces, written for one test."""

import json

import pytest

from holdfast.sim.curve import curve
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading


@pytest.fixture
def loaded(tmp_path):
    """Write rows as JSON lines, or text as it is, and load the file."""

    def load_rows(rows, name="traffic.jsonl", **reading):
        path = tmp_path / name
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text)
        return load(path, Reading(**reading))

    return load_rows


@pytest.fixture
def token_hit():
    """The share of input tokens that a store without end serves."""
    return lambda trace: curve(trace).token_hit(10**9)
