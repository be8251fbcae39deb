"""A converted trace or log says the same as its source, without its text."""

import json

import pytest

from holdfast.cli import USAGE, main
from holdfast.sim.curve import curve
from holdfast.sim.formats.load import load

SECRET = "the password is swordfish "


@pytest.fixture
def spend_log(tmp_path):
    """A spend log of LiteLLM, of one session that resends its messages."""
    said = [{"role": "user", "content": f"{SECRET}{n} " * 60} for n in range(4)]
    file = tmp_path / "spend.jsonl"
    rows = [
        {"startTime": f"2026-08-06T14:{5 * n:02d}:00Z", "endTime": f"2026-08-06T14:{5 * n:02d}:09Z",
         "prompt_tokens": 450 * n, "completion_tokens": 9, "session_id": "x",
         "call_type": "acompletion", "messages": said[:n], "model": "m"}
        for n in range(1, 5)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def same(one, other):
    assert one.time_s.tolist() == other.time_s.tolist()
    assert one.input_tokens.tolist() == other.input_tokens.tolist()
    assert one.output_tokens.tolist() == other.output_tokens.tolist()
    assert one.session.tolist() == other.session.tolist()
    assert (one.block_tokens, one.content, one.untimed) == (
        other.block_tokens, other.content, other.untimed,
    )  # fmt: skip
    assert curve(one).hit_tokens.tolist() == curve(other).hit_tokens.tolist()


def test_a_gateways_log_becomes_a_trace_without_text(spend_log, tmp_path, capsys):
    out = tmp_path / "trace.jsonl"
    assert main(["convert", str(spend_log), "--out", str(out)]) == 0
    assert "swordfish" not in out.read_text()
    same(load(spend_log), load(out))
    said = capsys.readouterr()
    assert "spend: 4 requests in 900 s, 4,500 tokens in, 36 out; " in said.err
    assert "of its blocks of 64 tokens were used before" in said.err
    assert said.out == ""
    assert main(["convert", str(spend_log)]) == 0
    assert capsys.readouterr().out == out.read_text()


@pytest.mark.parametrize("name", ["lmcache-agent", "taubench", "azure-conv", "conversation"])
def test_each_trace_is_the_same_when_it_is_converted(name, tmp_path, capsys):
    from holdfast.sim.shipped import find_trace

    out = tmp_path / f"{name}.jsonl"
    assert main(["convert", name, "--out", str(out)]) == 0
    one, other = load(find_trace(name)), load(out)
    if one.untimed:
        one = one._replace(time_s=other.time_s, untimed=other.untimed)
    assert other.time_s == pytest.approx(one.time_s, abs=1e-6)
    same(one._replace(time_s=other.time_s), other)
    if name == "azure-conv":
        assert "lengths only: no text or tokens of prompts" in capsys.readouterr().err


def test_a_rate_gives_an_untimed_trace_evenly_spaced_times(tmp_path, capsys):
    out = tmp_path / "paced.jsonl"
    assert main(["convert", "taubench", "--rate", "4", "--out", str(out)]) == 0
    trace = load(out)
    assert not trace.untimed
    assert trace.span_s == pytest.approx((trace.requests - 1) / 4)
    assert "so its requests arrive evenly, 4 a second" in capsys.readouterr().err


def test_an_unknown_log_format_is_refused(tmp_path, capsys):
    file = tmp_path / "notes.txt"
    file.write_text("hello\n")
    assert main(["convert", str(file)]) == USAGE
    assert "unknown format (hello)" in capsys.readouterr().err
