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


def test_a_block_size_that_is_not_detected_can_be_given(odd, ladder, reported, capsys):
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
def test_a_window_out_of_bounds_is_refused(odd, ladder, window, capsys):
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
def test_trace_options_without_a_trace_are_refused(option, capsys):
    users = ["size", "--model", "qwen3-8b", "--users", "3", "--context", "1000"]
    assert main([*users, option, "5"]) == USAGE
    assert f"{option}: needs a trace; add --trace" in capsys.readouterr().err


FAST = [1000 * n + n * n for n in range(12)]


@pytest.fixture
def trace(tmp_path):
    """Write a trace of requests of two blocks that share the first; return its path."""

    def written(times, **more):
        file = tmp_path / "traffic.jsonl"
        row = {"input_length": 1024, "output_length": 9, **more}
        rows = [{"timestamp": at, "hash_ids": [1, n + 2], **row} for n, at in enumerate(times)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return written


NO_TIMES = [
    ([0, 1, 2, 3], "its times number the requests: 0, 1, 2, ..."),
    ([5, 5, 5], "all its requests have the same time"),
    ([None] * 4, "it has no times"),
    ([at / 1000 for at in FAST], "requests a second if they are milliseconds"),
]


@pytest.mark.parametrize(("times", "why"), NO_TIMES)
def test_without_times_a_rate_is_needed(trace, ladder, times, why, reported, capsys):
    file = trace(times)
    for command in (["sim", file, "--ladder", ladder], [*SIZE, file]):
        assert main(command) == USAGE
        said = capsys.readouterr().err
        assert why in said
        assert "add --rate N" in said
    for command in (["sim", file, "--ladder", ladder], [*SIZE, file]):
        status, rows = reported(*command, "--rate", "2")
        assert status == 0
        said = [row["says"] for row in rows if row["what"].endswith("assumption")]
        assert any("so its requests arrive evenly, 2 a second" in line for line in said)
    [again] = [
        row
        for row in reported("sim", file, "--ladder", ladder, "--rate", "2")[1]
        if row["what"] == "sim.reuse.p50"
    ]
    assert again["value"] == 0.5


def test_a_time_unit_sets_the_scale_of_numeric_times(trace, ladder, reported):
    file = trace([at / 1000 for at in FAST])
    for unit in ("s", "ms"):
        assert reported("sim", file, "--ladder", ladder, "--time-unit", unit)[0] == 0
        status, rows = reported(*SIZE, file, "--time-unit", unit)
        rate = 12 / 11.12 if unit == "s" else 12.0
        assert (status, rows[0]["value"]) == (0, pytest.approx(rate, rel=0.01))


def test_a_rate_rescales_the_times_of_a_trace(trace, ladder, reported, capsys):
    file = trace(FAST)
    rows = reported("sim", file, "--ladder", ladder, "--rate", "0.01")[1]
    assert any("its times are 98.9 times as far apart" in str(row.get("says")) for row in rows)
    for command in (["sim", file, "--ladder", ladder], [*SIZE, file]):
        assert main([*command, "--rate", "0"]) == USAGE
        assert "--rate: 0: give 1e-09 to 1e+09 requests a second" in capsys.readouterr().err


def test_a_trace_without_content_is_refused(ladder, tmp_path, capsys):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,480,10\n"
        "2023-11-16 18:17:09,480,10\n"
    )
    burst = tmp_path / "burst.csv"
    head = "Timestamp,Session ID,Request tokens,Response tokens"
    burst.write_text(f"{head}\n1,a,128,9\n9,b,128,9\n")
    for file in (azure, burst):
        for command in (["sim", str(file), "--ladder", ladder], [*SIZE, str(file)]):
            assert main(command) == USAGE
            assert "no content, so its reuse is unknown" in capsys.readouterr().err


def test_a_block_size_that_is_a_guess_is_stated(tmp_path, ladder, reported):
    file = tmp_path / "one.jsonl"
    rows = [{"timestamp": 999 * n * n, "input_length": 500, "hash_ids": [1]} for n in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in (["sim", str(file), "--ladder", ladder], [*SIZE, str(file)]):
        rows = reported(*command)[1]
        found = rows[0]["block_tokens"], rows[0]["other_block_tokens"]
        assert found == (256, [512, 1024, 2048, 4096])
        said = [row["says"] for row in rows if row["what"].endswith("assumption")]
        assert any("256 tokens are assumed; blocks of 512 or 1,024" in line for line in said)
        rows = reported(*command, "--block-tokens", "512")[1]
        assert (rows[0]["block_tokens"], rows[0]["other_block_tokens"]) == (512, [])


def test_requests_that_are_too_long_can_be_dropped(tmp_path, ladder, reported, capsys):
    file = tmp_path / "long.jsonl"
    lengths = {10: 4, 80: 3, 81: 2, 100: 1}  # Qwen3-8B takes 80 blocks of 512 tokens
    rows = [
        {"timestamp": 999 * at * at, "input_length": 512 * n, "hash_ids": list(range(n))}
        for at, n in enumerate(n for n, count in lengths.items() for _ in range(count))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    simulate = ["sim", str(file), "--ladder", ladder, "--model", "qwen3-8b"]
    for command in (simulate, [*SIZE, str(file)]):
        assert main(command) == USAGE
        assert "3 of the 10 requests of long are longer" in (said := capsys.readouterr().err)
        assert "drop them with --drop-longer" in said
        status, rows = reported(*command, "--drop-longer")
        assert status == 0
        said = [row["says"] for row in rows if row["what"].endswith("assumption")]
        assert any("3 of its 10 requests (48.3% of the input) are dropped" in line for line in said)
    assert main(["sim", str(file), "--ladder", ladder, "--drop-longer"]) == USAGE
    assert "--drop-longer: needs a model" in capsys.readouterr().err
    file.write_text("".join(json.dumps(row) + "\n" for row in [
        {"timestamp": 7 * at, "input_length": 51200, "hash_ids": list(range(100))} for at in (1, 9)
    ]))  # fmt: skip
    assert main([*simulate, "--drop-longer"]) == USAGE
    assert "--drop-longer: all 2 requests of long are longer" in capsys.readouterr().err
