"""What a trace leaves open is said in the same words to `sim` and to `size`."""

import json

import pytest

from holdfast.cli import USAGE, main

SIZE = ["size", "--model", "qwen3-8b", "--trace"]
BLOCK = 96
"""Tokens in a block of the trace: no power of two, so nothing finds it out."""


@pytest.fixture
def odd(tmp_path):
    """A trace whose block size has to be said, as one line a request."""
    trace = tmp_path / "odd.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": BLOCK * n, "output_length": 1, "hash_ids": ids}
        for n, ids in ((9, list(range(9))), (10, list(range(10))), (11, list(range(11))))
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(trace)


@pytest.fixture
def ladder(tmp_path):
    """A ladder file."""
    file = tmp_path / "ladder.yaml"
    tiers = "tiers: [{kind: host, capacity: 1 GiB}]"
    file.write_text(f"engine: {{prefill: {{b: 0.001}}}}\ntoken_bytes: 1000\n{tiers}\n")
    return str(file)


def test_a_block_size_that_is_not_found_can_be_said(odd, ladder, reported, capsys):
    for command in (["sim", odd, "--ladder", ladder], [*SIZE, odd]):
        assert main(command) == USAGE
        assert "no power of two" in (said := capsys.readouterr().err)
        assert "--block-tokens" in said
    assert reported("sim", odd, "--ladder", ladder, "--block-tokens", BLOCK)[0] == 0
    status, rows = reported(*SIZE, odd, "--block-tokens", BLOCK)
    assert status == 0
    [hit] = [row["value"] for row in rows if row["what"] == "size.hit"]
    assert hit == pytest.approx(19 / 30)


@pytest.mark.parametrize("window", ["inf", "nan", "-1"])
def test_a_window_is_seconds(odd, ladder, window, capsys):
    for command in (["sim", odd, "--ladder", ladder], [*SIZE, odd]):
        assert main([*command, f"--window={window}"]) == USAGE
        assert f"window of {window} s: give 0 to 1e+09" in capsys.readouterr().err


def test_a_window_is_for_sessions_without_a_common_clock(odd, ladder, tmp_path, reported, capsys):
    sizes = ["--block-tokens", str(BLOCK), "--window", "60"]
    for command in (["sim", odd, "--ladder", ladder], [*SIZE, odd]):
        assert main([*command, *sizes]) == USAGE
        said = capsys.readouterr().err
        assert "--window: 60 s: for sessions" in said
        assert "odd have times of their own; omit it" in said
    sessions = tmp_path / "sessions.jsonl"
    asked = [{"t": 9 * n, "in": 64 * n, "out": 1, "hash_ids": list(range(n))} for n in (2, 3)]
    sessions.write_text(json.dumps({"block_size": 64, "requests": asked}) + "\n")
    assert reported(*SIZE, str(sessions), "--window", "60")[0] == 0


@pytest.mark.parametrize("option", ["--block-tokens", "--window"])
def test_users_have_no_trace_to_read(option, capsys):
    users = ["size", "--model", "qwen3-8b", "--users", "3", "--context", "1000"]
    assert main([*users, option, "5"]) == USAGE
    assert f"{option}: needs a trace; add --trace" in capsys.readouterr().err
