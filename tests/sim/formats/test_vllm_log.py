"""The log of a vLLM server is a trace; `logs/vllm.log` was written by vLLM 0.33's own logger."""

from pathlib import Path

import pytest

from holdfast.errors import TraceError
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading

LOG = Path(__file__).parent / "logs" / "vllm.log"
BY_16 = Reading(block_tokens=16)


def chains(trace):
    return [trace.chain(request).tolist() for request in range(trace.requests)]


def older(request, at, prompt, tokens, level="INFO"):
    """A line as vLLM up to 0.10 wrote it."""
    params = "SamplingParams(n=1, stop=[], max_tokens=64)"
    return (
        f"{level} {at} [logger.py:43] Received request cmpl-{request}: prompt: {prompt!r}, "
        f"params: {params}, prompt_token_ids: {tokens}, lora_request: None.\n"
    )


def coloured(line):
    head, _, rest = line.partition(" [")
    process, level, *at = head.rsplit(" ", 3)
    return (
        f"\x1b[0;36m{process}\x1b[0;0m \x1b[32m{level}\x1b[0m \x1b[90m{' '.join(at)}\x1b[0m"
        f" \x1b[90m[{rest.replace(']', chr(93) + chr(27) + '[0m', 1)}"
    )


@pytest.mark.parametrize("colour", [str, coloured])
def test_prompt_tokens_output_lengths_and_times_are_read_from_a_vllm_log(tmp_path, colour):
    file = tmp_path / "server.log"
    lines = LOG.read_text().splitlines(keepends=True)
    startup = "INFO 11-27 12:00:00 [api_server.py:1] vLLM API server version 0.33\nplain text\n"
    file.write_text(startup + "".join(colour(line) for line in lines))
    trace = load(file, BY_16)
    assert trace.time_s.tolist() == [0, 2, 3]
    assert trace.input_tokens.tolist() == [84, 104, 74]
    assert trace.output_tokens.tolist() == [7, 9, 3]
    assert chains(trace) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert trace.content
    assert trace.remarks == ("its times are whole seconds",)


def test_prompts_logged_at_info_level_by_older_vllm_are_read(loaded):
    tokens = list(range(40))
    trace = loaded(
        older("a", "12-31 23:59:58", 'say "x", prompt_token_ids: [7]', tokens)
        + "INFO 01-01 00:00:01 [loggers.py:1] Engine 000: Avg prompt throughput: 5 tokens/s\n"
        + older("b", "01-01 00:00:03", "it's", [*tokens[:32], 99]),
        "vllm.log",
        block_tokens=16,
    )
    assert trace.time_s.tolist() == [0, 5]
    assert (trace.input_tokens.tolist(), chains(trace)) == ([40, 33], [[0, 1], [0, 1]])
    assert "no lengths of answers; add --enable-log-outputs" in trace.remarks[1]


def test_prompt_text_is_used_if_tokens_are_not_logged(loaded):
    text = "<|system|>\nBe brief: don't.\n" * 20
    lines = [older(n, f"07-01 00:00:0{2 * n}", text + end, None) for n, end in enumerate("ab")]
    trace = loaded("".join(lines), "vllm.log")
    assert trace.input_tokens.tolist() == [len(text) // 4 + 1] * 2
    assert trace.chain(0).tolist() == trace.chain(1).tolist() == [0, 1]


def test_a_log_without_prompts_is_refused_with_the_options_that_log_them(loaded):
    line = "INFO 11-27 12:00:00 [request_logger.py:65] Received request a: params: None.\n"
    with pytest.raises(TraceError, match="--enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG"):
        loaded(line, "vllm.log")
    with pytest.raises(TraceError, match=r'vllm.log:1: "13-01 00:00:00": not a date'):
        loaded(older("a", "13-01 00:00:00", "x", [1]), "vllm.log")


def test_a_remark_says_that_prompts_of_equal_length_may_be_truncated(loaded):
    lines = [older(n, f"07-01 00:{n:02d}:00", "x", list(range(20))) for n in range(12)]
    remarks = loaded("".join(lines), "vllm.log").remarks
    assert remarks[0].startswith("12 of its 12 prompts have the length 20: if the server ran with")
