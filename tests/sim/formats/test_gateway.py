"""Logs of gateways are traces: OpenAI's usage lines and LiteLLM's spend logs."""

import csv
import io
import json

import pytest

from holdfast.errors import TraceError

SYSTEM = {"role": "system", "content": "You answer questions about contracts. " * 30}
ASKED = [{"role": "user", "content": f"What about clause {n}? " * 20} for n in range(3)]
ANSWER = {"role": "assistant", "content": "It says nothing."}
FIRST, OTHER = [SYSTEM, ASKED[0]], [SYSTEM, ASKED[1]]
SECOND = [*FIRST, ANSWER, ASKED[2]]
START_S = 1_764_000_000


def tokens_of(messages):
    return len(json.dumps(messages, separators=(",", ":"))) // 4


def usage(said, answer=20, **more):
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "model": "m",
        "usage": {"prompt_tokens": tokens_of(said), "completion_tokens": answer,
                  "total_tokens": tokens_of(said) + answer,
                  "prompt_tokens_details": {"cached_tokens": 0}}, **more,
    }  # fmt: skip


def spend(at_s, messages, stored=True, **more):
    at = f"2026-08-06T14:30:{at_s:02d}.250000+00:00"
    return {
        "request_id": f"chatcmpl-{at_s}", "call_type": "acompletion", "spend": 0.00012,
        "total_tokens": tokens_of(messages) + 20, "prompt_tokens": tokens_of(messages),
        "completion_tokens": 20, "startTime": at, "endTime": at.replace(".25", ".75"),
        "model": "m", "model_group": "m", "cache_hit": "None", "status": "success",
        "session_id": "s", "metadata": {"usage_object": {"prompt_tokens": 1}},
        "messages": {}, "response": {}, "request_tags": ["a", "b"],
        "proxy_server_request": {"model": "m", "messages": messages} if stored else {}, **more,
    }  # fmt: skip


def check_shared(trace):
    """The second request repeats the first, the third one only the system prompt."""
    first, second, third = (trace.chain(n).tolist() for n in range(3))
    assert trace.input_tokens.tolist() == [tokens_of(each) for each in (FIRST, SECOND, OTHER)]
    assert trace.output_tokens.tolist() == [20] * 3
    assert len(first) == tokens_of(FIRST) // 16
    assert len(second) == tokens_of(SECOND) // 16
    assert abs(len(set(first) & set(second)) - len(first)) <= 2
    shared = tokens_of([SYSTEM]) // 16
    assert abs(len(set(first) & set(third)) - shared) <= 2
    assert trace.content


RECORDS = {
    "response with messages": lambda at_s, messages: usage(
        messages, created=START_S + at_s, messages=messages
    ),
    "request and response": lambda at_s, messages: {
        "request": {"model": "m", "messages": messages},
        "response": usage(messages, created=START_S + at_s),
    },
    "batch of OpenAI": lambda at_s, messages: {
        "custom_id": "1", "body": {"model": "m", "messages": messages},
        "response": {"status_code": 200, "body": usage(messages, created=START_S + at_s)},
    },
    "milliseconds": lambda at_s, messages: usage(
        messages, timestamp=1000 * (START_S + at_s), messages=messages
    ),
    "dates": lambda at_s, messages: usage(
        messages, timestamp=f"2026-08-06T14:30:{at_s:02d}Z", messages=messages
    ),
}  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_usage_lines_with_prompts_are_a_trace_with_content(loaded, record):
    make = RECORDS[record]
    trace = loaded([make(0, FIRST), make(7, SECOND), make(19, OTHER)], block_tokens=16)
    assert trace.time_s.tolist() == [0, 7, 19]
    check_shared(trace)


def test_usage_records_without_prompts_give_lengths_only(loaded):
    rows = [usage(each, created=START_S + 7 * n * n) for n, each in enumerate((FIRST, SECOND))]
    trace = loaded(rows)
    assert (trace.content, trace.requests, trace.time_s.tolist()) == (False, 2, [0, 7])
    untimed = loaded([usage(FIRST), usage(SECOND)])
    assert untimed.untimed == "it has no times"


@pytest.mark.parametrize(
    "text",
    [
        (
            "timestamp,model,prompt_tokens,completion_tokens\n"
            "1764000000.5,m,640,9\n1764000007.5,m,128,3\n"
        ),
        (
            "created,usage\n"
            '2026-08-06T14:30:00Z,"{""prompt_tokens"": 640, ""completion_tokens"": 9}"\n'
            '2026-08-06 14:30:07+00,"{""prompt_tokens"": 128, ""completion_tokens"": 3}"\n'
        ),
        (
            '{"ts": 1764000000123, "prompt_tokens": 640, "completion_tokens": 9}\n'
            '{"ts": 1764000007123, "prompt_tokens": 128, "completion_tokens": 3}\n'
        ),
    ],
)
def test_usage_may_be_columns_or_fields_of_the_record(loaded, text):
    trace = loaded(text)
    assert trace.time_s.tolist() == [0, 7]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([640, 128], [9, 3])


def test_continued_responses_are_one_session_that_resends_its_history(loaded):
    def response(number, tokens, before):
        return {
            "id": f"resp_{number}", "object": "response", "created_at": START_S + 9 * number**2,
            "usage": {"input_tokens": tokens, "output_tokens": 64},
            "previous_response_id": before,
        }  # fmt: skip

    trace = loaded([response(1, 640, None), response(2, 768, "resp_1"), response(3, 640, None)])
    assert trace.session.tolist() == [0, 0, 1]
    assert [len(trace.chain(n)) for n in range(3)] == [10, 12, 10]
    assert trace.unique == 22


def test_input_tokens_of_anthropic_usage_include_cached_tokens(loaded):
    counts = {"input_tokens": 5, "cache_read_input_tokens": 900, "output_tokens": 7}
    trace = loaded([{"usage": counts, "timestamp": START_S + n} for n in (0, 5)])
    assert trace.input_tokens.tolist() == [905, 905]


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: json.dumps(value) if isinstance(value, dict | list) else value
                         for name, value in row.items()})  # fmt: skip
    return text.getvalue()


WRITTEN = {
    "JSON lines": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "list": json.dumps,
    "answer of /spend/logs/v2": lambda rows: json.dumps({"data": rows, "total": 3}, indent=2),
    "CSV": as_csv,
}


@pytest.mark.parametrize("form", WRITTEN)
def test_spend_logs_of_litellm_are_read_in_each_form(loaded, form):
    rows = [spend(0, FIRST), spend(7, SECOND), spend(19, OTHER)]
    trace = loaded(WRITTEN[form](rows), block_tokens=16)
    assert trace.time_s.tolist() == [0, 7, 19]
    assert trace.session.tolist() == [0, 0, 0]
    assert trace.think_s[1:] == pytest.approx([6.5, 11.5])
    check_shared(trace)
    without = loaded(WRITTEN[form]([spend(n, FIRST, stored=False) for n in (0, 9)]))
    assert (without.content, without.requests) == (False, 2)


def test_rows_that_reached_no_engine_are_left_out_and_counted(loaded):
    rows = [
        spend(0, FIRST),
        spend(1, FIRST, cache_hit="True"),
        spend(2, FIRST, status="failure", prompt_tokens=0),
        spend(3, FIRST, call_type="aembedding"),
        spend(9, FIRST, call_type="anthropic_messages"),
    ]
    trace = loaded(rows)
    assert trace.requests == 2
    assert trace.remarks == (
        "3 rows are left out: failed, served by LiteLLM's own cache, or no chats",
    )
    with pytest.raises(TraceError, match="no requests in it"):
        loaded(rows[1:3])


def test_prompts_that_were_not_stored_count_as_new(loaded):
    trace = loaded([spend(0, FIRST), spend(7, SECOND, stored=False), spend(19, FIRST)])
    assert "1 of its 3 requests have no text, so their blocks count as new" in trace.remarks
    assert set(trace.chain(0)) == set(trace.chain(2))
    assert not set(trace.chain(0)) & set(trace.chain(1))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"usage": 5}, "jsonl:1: no usage in it"),
        ({"usage": {"total_tokens": 5}}, "jsonl:1: no prompt_tokens or input_tokens"),
        ({"usage": {"prompt_tokens": -5}}, 'prompt_tokens "-5": not a number of tokens'),
        ({"usage": {"prompt_tokens": True}}, 'prompt_tokens "True": not a number of tokens'),
        ({"usage": {"prompt_tokens": 5}, "created": "soon"}, 'created "soon": not a date'),
        ({"usage": {"prompt_tokens": 5}, "created": [1]}, "created .1.: not a time"),
        (spend(0, FIRST, startTime="noon"), 'startTime "noon": not a date'),
    ],
)
def test_an_invalid_usage_record_is_refused_with_line_and_field(loaded, row, message):
    with pytest.raises(TraceError, match=message):
        loaded([row])
