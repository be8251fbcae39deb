"""Every format is told by its content and says the same about what it has in common."""

import contextlib
import gzip
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import TraceError
from holdfast.sim.formats.load import FORMATS, load
from holdfast.sim.formats.rows import Reading

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 6, "hash_ids": [7, 9]},
    {"timestamp": 3000, "input_length": 513, "output_length": 0, "hash_ids": [7, 8]},
]


def jsonl(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def read(tmp_path):
    """Write a file and load it."""

    def loaded(content: bytes, reading: Reading | None = None):
        path = tmp_path / "traffic"
        path.write_bytes(content)
        return load(path, reading)

    return loaded


def chains(trace) -> list[list[int]]:
    return [trace.chain(request).tolist() for request in range(trace.requests)]


def test_a_mooncake_trace_is_read(read) -> None:
    trace = read(jsonl(MOONCAKE))
    assert (trace.name, trace.block_tokens) == ("traffic", 512)
    assert trace.time_s.tolist() == [0.0, 3.0, 3.0]
    assert trace.input_tokens.tolist() == [1000, 1024, 513]
    assert trace.output_tokens.tolist() == [5, 6, 0]
    assert chains(trace) == [[0, 1], [0, 2], [0, 1]]
    assert trace.session.tolist() == [-1, -1, -1]
    assert np.isnan(trace.think_s).all()


def test_a_gzip_file_loads_like_the_plain_file(read) -> None:
    plain, packed = read(jsonl(MOONCAKE)), read(gzip.compress(jsonl(MOONCAKE)))
    assert chains(plain) == chains(packed)


def test_blank_lines_are_passed_over(read) -> None:
    assert read(b"\n" + jsonl(MOONCAKE).replace(b"\n", b"\n\n")).requests == 3


def test_a_mooncake_trace_with_sessions_and_only_full_blocks_is_read(read) -> None:
    rows = [
        {"timestamp": 0, "session_id": "b", "input_length": 130, "hash_ids": [1, 2]},
        {"timestamp": 1, "session_id": 4, "input_length": 63, "hash_ids": []},
        {"timestamp": 2, "session_id": "b", "input_length": 200, "hash_ids": [1, 2, 3]},
    ]
    trace = read(jsonl(rows))
    assert trace.block_tokens == 64
    assert trace.session.tolist() == [0, 1, 0]
    assert chains(trace) == [[0, 1], [], [0, 1, 2]]


@pytest.mark.parametrize(
    ("tokens", "ids", "size"), [(64, 1, 64), (1024, 2, 512), (1025, 3, 512), (100, 12, 8)]
)
def test_the_block_size_is_found_from_a_single_length(read, tokens, ids, size) -> None:
    row = {"timestamp": 0, "input_length": tokens, "hash_ids": list(range(ids))}
    assert read(jsonl([row])).block_tokens == size


def test_a_bailian_trace_is_read(read) -> None:
    def row(chat: int, parent: int, at: float, ids: list[int]) -> dict:
        length = 16 * len(ids) - 3
        return {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": at,
            "input_length": length,
            "output_length": 3,
            "type": "text",
            "turn": 1,
            "hash_ids": ids,
        }

    trace = read(jsonl([row(1, -1, 0.5, [5, 6]), row(2, -1, 1.5, [6, 5]), row(9, 1, 3, [5, 6, 6])]))
    assert trace.block_tokens == 16
    assert trace.time_s.tolist() == [0.0, 1.0, 2.5]
    assert trace.session.tolist() == [0, 1, 0]
    assert chains(trace) == [[0, 1], [2, 3], [0, 1, 4]]


SESSIONS = [
    {
        "id": "a",
        "block_size": 4,
        "subagents": [{"t": 10.0}],
        "requests": [
            {"t": 0, "in": 9, "out": 1, "think": 0, "runs": [[1, 2]]},
            {"t": 5, "in": 13, "out": 1, "think": 2.5, "runs": [[1, 1], [5, 2]]},
            {"t": 1, "in": 4, "out": 1, "think": 0, "sub": 0, "runs": [[9, 1]]},
        ],
    },
    {"id": "b", "block_size": 4, "prefix_of": "a", "requests": [{"t": 0, "in": 4, "out": 1}]},
    {
        "id": "c",
        "block_size": 4,
        "hash_id_scope": "local",
        "requests": [
            {"t": 0, "in": 8, "out": 1, "hash_ids": [1, 2]},
            {
                "t": 7,
                "type": "subagent",
                "requests": [{"t": 2, "in": 12, "out": 1, "hash_ids": [1, 2, 4]}],
            },
        ],
    },
]


def test_agent_sessions_start_within_the_window(read) -> None:
    trace = read(jsonl(SESSIONS), Reading(window_s=100.0))
    first, second = 100 * 0.13436424411240122, 100 * 0.8474337369372327  # random.Random(1)
    assert trace.time_s + first == pytest.approx([first, first + 5, first + 11, second, second + 9])
    assert trace.session.tolist() == [0, 0, 0, 1, 1]
    assert chains(trace) == [[0, 1], [0, 2, 3], [4], [5, 6], [5, 6, 7]]
    assert [None if math.isnan(gap) else gap for gap in trace.think_s] == [
        None, 2.5, 0.0, None, None,
    ]  # fmt: skip


def test_requests_of_a_nested_sub_agent_have_their_time_and_order(read) -> None:
    def request(at, block, **more):
        return {"t": at, "in": 4, "out": 1, "hash_ids": [block], **more}

    inner = {"t": 2, "type": "subagent", "requests": [request(0.5, 2)]}
    outer = {"t": 3, "requests": [request(1, 1), inner, request(4, 3, sub=0)]}
    session = {"block_size": 4, "subagents": [{"t": 20}], "requests": [outer, request(30, 4)]}
    trace = read(jsonl([session]), Reading(window_s=0.0))
    assert trace.time_s.tolist() == [0, 1.5, 20, 26]  # from 4 s, when the first one came
    assert chains(trace) == [[0], [1], [2], [3]]
    session["requests"][0]["requests"][2]["sub"] = 1
    with pytest.raises(TraceError, match="request at 4 s: sub 1, but there are 1 subagents"):
        read(jsonl([session]), Reading(window_s=0.0))


def test_agent_sessions_interleave(read) -> None:
    trace = read(jsonl(SESSIONS), Reading(window_s=0.0))
    assert trace.time_s.tolist() == [0, 0, 5, 9, 11]
    assert chains(trace) == [[0, 1], [2, 3], [0, 4, 5], [2, 3, 6], [7]]
    assert trace.input_tokens.tolist() == [9, 8, 13, 12, 4]


BURSTGPT = b"""Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type
5,s,2,ChatGPT,130,60,Conversation log
6,,1,GPT-4,70,10,API log
20,s,1,ChatGPT,200,1,Conversation log
30,s,1,ChatGPT,100,1,Conversation log
"""


def test_burstgpt_sessions_that_resend_their_history_share_it(read) -> None:
    trace = read(BURSTGPT)
    assert trace.block_tokens == 64
    assert trace.time_s.tolist() == [0, 1, 15, 25]
    assert chains(trace) == [[0, 1], [2], [0, 1, 3], [4]]
    assert trace.session.tolist() == [0, -1, 0, 0]
    assert trace.think_s[2:].tolist() == [13, 9]


def test_a_burstgpt_trace_without_sessions_is_read(read) -> None:
    trace = read(b"Timestamp,Model,Request tokens,Response tokens\n5,x,64,6\n6.5,x,64,6\n")
    assert chains(trace) == [[0], [1]]
    assert trace.time_s.tolist() == [0, 1.5]


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azure_traces_of_2023_and_2024_are_read(read, zone) -> None:
    trace = read(
        f"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.9799600{zone},130,10\r\n"
        f"2023-11-17 00:00:00.4799600{zone},63,8\r\n".encode(),
        Reading(block_tokens=32),
    )
    assert trace.time_s == pytest.approx([0.0, 0.5])
    assert chains(trace) == [[0, 1, 2, 3], [4]]


def test_sharegpt_hashes_text(read) -> None:
    said = "x" * 50
    talks = [
        {
            "id": "1",
            "conversations": [
                {"from": "human", "value": said},
                {"from": "gpt", "value": "y" * 30},
                {"from": "human", "value": said},
                {"from": "gpt", "value": "z"},
            ],
        },
        {"conversations": [{"from": "human", "value": said}, {"from": "gpt", "value": "w"}]},
    ]
    as_list = read(json.dumps(talks).encode(), Reading(block_tokens=4))
    as_lines = read(jsonl(talks), Reading(block_tokens=4))
    assert chains(as_list) == chains(as_lines)
    first, second, other = chains(as_list)
    assert first == other == list(range(len("human: \n" + said) // 16))
    assert second[: len(first)] == first
    assert as_list.input_tokens.tolist() == [15, 38, 15]
    assert as_list.session.tolist() == [0, 0, 1]


def test_a_trace_of_recorded_events_is_read(read) -> None:
    rows = [
        {"at_s": 7, "fingerprint": "ab", "tokens": 300, "keys": ["0a", "0b"], "session": "s"},
        {"at_s": 9.5, "fingerprint": "ab", "tokens": 400, "output_tokens": 9,
         "keys": ["0a", "0c", "0d"]},
    ]  # fmt: skip
    trace = read(jsonl(rows))
    assert trace.block_tokens == 128
    assert chains(trace) == [[0, 1], [0, 2, 3]]
    assert trace.time_s.tolist() == [0, 2.5]
    assert trace.session.tolist() == [0, -1]


def test_a_folder_is_read_as_one_file(tmp_path) -> None:
    (tmp_path / "README.md").write_text("not a trace")
    for at, session in enumerate(SESSIONS):
        (tmp_path / f"{at}.json").write_text(json.dumps(session))
    trace = load(tmp_path, Reading(window_s=0.0))
    assert trace.session.tolist() == [0, 1, 0, 1, 0]
    (tmp_path / "1.json").write_text(json.dumps(SESSIONS[2] | {"block_size": 8}))
    with pytest.raises(TraceError, match=r"/1.json:1: block_size 8 after 4"):
        load(tmp_path)


def test_a_folder_without_traces_is_refused(tmp_path) -> None:
    with pytest.raises(
        TraceError, match=r"no .json, .jsonl, .csv or .log file in this folder.*; name a trace"
    ):
        load(tmp_path)


def test_a_byte_order_mark_is_passed_over(read) -> None:
    assert read(b"\xef\xbb\xbf" + GOOD).requests == 3


def test_unsorted_requests_are_sorted_with_a_warning(read, caplog) -> None:
    trace = read(jsonl([MOONCAKE[1], MOONCAKE[0], MOONCAKE[2]]))
    assert trace.time_s.tolist() == [0.0, 3.0, 3.0]
    assert chains(trace) == [[0, 1], [0, 2], [0, 1]]
    assert caplog.text.count("traffic:2: arrives before the request above") == 1


AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
RECORDED = (
    b'{"at_s": 7, "fingerprint": "ab", "tokens": 300, "keys": ["0a", "0b"], "session": "s"}\n'
)
USAGE = (
    b'{"id": "a", "created": 1764000000, "usage": {"prompt_tokens": 130, "completion_tokens": 9}, '
    b'"messages": [{"role": "user", "content": "why?"}]}\n'
)
SPEND = (
    b"request_id,call_type,startTime,prompt_tokens,completion_tokens,messages\n"
    b'a,acompletion,2026-08-06T14:30:00Z,130,9,"[{""role"": ""user""}]"\n'
)
SERVER = (
    b"INFO 07-01 00:00:00 [logger.py:43] Received request a: prompt: 'it\\'s', params: x, "
    b"prompt_token_ids: [1, 2, 3]\n"
)
TALK = b'[{"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}]}]'


def without(row: dict, name: str) -> dict:
    return {key: value for key, value in row.items() if key != name}


GOOD = jsonl(MOONCAKE)
WRONG = {
    "nothing": (b"", "traffic: unknown format (no fields)"),
    "blank": (b" \n\n", "unknown format"),
    "unknown": (b'{"a": 1}\n', "unknown format (a); known by their fields: Mooncake JSONL"),
    "text": (b"hello\n", "unknown format (hello); known"),
    "noise": (b"\x1b[2J" + b"a" * 999 + b"\n", f"unknown format (\\x1b[2J{'a' * 36}); known"),
    "binary": (bytes(range(256)), "unknown format"),
    "header only": (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests in it"),
    "cut line": (GOOD[:-20], "traffic:3: not JSON"),
    "not an object": (GOOD + b"7\n", "traffic:4: Expected `object`, got `int`"),
    "no length": (
        GOOD + jsonl([without(MOONCAKE[0], "input_length")]),
        "traffic:4: Object missing required field `input_length`; correct or remove the line",
    ),
    "negative": (
        GOOD + jsonl([MOONCAKE[0] | {"input_length": -1}]),
        "traffic:4: Expected `int` >=",
    ),
    "huge": (GOOD + jsonl([MOONCAKE[0] | {"input_length": 2**40}]), "traffic:4: Expected `int` <="),
    "huge id": (GOOD + jsonl([MOONCAKE[0] | {"hash_ids": [2**70]}]), "traffic:4: "),
    "not a number": (GOOD.replace(b"3000", b"NaN"), "traffic:2: not JSON"),
    "too many ids": (
        GOOD + jsonl([MOONCAKE[0] | {"hash_ids": [1, 2, 3, 4]}]),
        "traffic:4: 4 ids for 1000 tokens, but about 2.0 blocks of 512 tokens",
    ),
    "too few ids": (GOOD + jsonl([MOONCAKE[0] | {"hash_ids": [1]}]), "traffic:4: 1 ids for 1000"),
    "mixed sizes": (
        GOOD + jsonl([MOONCAKE[0] | {"hash_ids": list(range(63))}]),
        "the file mixes block sizes",
    ),
    "no size": (
        jsonl([MOONCAKE[0] | {"hash_ids": [1] * 900}]),
        "from 8 to 4,096 tokens per block fits most lines; give the block size with --block",
    ),
    "cut gzip": (gzip.compress(GOOD * 999)[:-200], "the gzip data ends early"),
    "damaged gzip": (
        gzip.compress(GOOD)[:-8] + bytes(8),
        "the gzip data is damaged",
    ),
    "cells": (BURSTGPT + b"31,s,1\n", "traffic:6: 3 cells under 7 columns: is the file cut?"),
    "no number": (
        BURSTGPT + b"31,s,1,ChatGPT,many,1,log\n",
        'traffic:6: Request tokens "many": not a number',
    ),
    "half a token": (
        BURSTGPT + b"31,s,1,ChatGPT,1.5,1,log\n",
        "traffic:6: Request tokens 1.5: not",
    ),
    "no date": (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n",
        'traffic:2: TIMESTAMP "soon": not a date and time',
    ),
    "sub-agent": (
        jsonl([SESSIONS[0] | {"subagents": []}]),
        "traffic:1: request at 1 s: sub 0, but there are 0 subagents",
    ),
    "session ids": (
        jsonl([SESSIONS[0], {"block_size": 4, "requests": [{"t": 0, "in": 99, "out": 1}]}]),
        "traffic:2: request 0 at 0 s: 0 ids for 99 tokens",
    ),
    "session sizes": (
        jsonl([SESSIONS[0], SESSIONS[2] | {"block_size": 8}]),
        "traffic:2: block_size 8 after 4: a trace has one block size",
    ),
    "only prefixes": (jsonl([SESSIONS[1]]), "no requests in it"),
    "keys": (
        b'{"at_s": 1, "fingerprint": "ab", "tokens": 1, "keys": ["no hex"]}\n',
        "traffic:1: Expected `str` matching regex",
    ),
    "far off": (GOOD.replace(b"3000", b"1e300"), "traffic:2: Expected `float` <="),
    "no time": (
        BURSTGPT + b"inf,s,1,ChatGPT,1,1,log\n",
        'traffic:6: Timestamp "inf": not a number',
    ),
    "deep": (
        b'{"block_size": 4, "requests": ' + b'[{"t": 1, "requests": ' * 20_000,
        "traffic:1: nested too deeply",
    ),
    "turns": (b'[{"conversations": [{"from": "human", "value": 3}]}]', "traffic:1: Expected `str`"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_trace_is_refused_with_line_and_reason(read, case) -> None:
    content, message = WRONG[case]
    with pytest.raises(TraceError) as error:
        read(content)
    assert message in str(error.value)
    assert len(str(error.value)) < 1_000


def test_the_error_for_an_unknown_format_lists_all_known_formats(read) -> None:
    with pytest.raises(TraceError) as error:
        read(b"{}")
    assert all(form.name in str(error.value) for form in FORMATS)


def test_a_missing_file_is_refused_with_its_path(tmp_path) -> None:
    with pytest.raises(TraceError, match="nowhere: cannot be read: No such file"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (Reading(block_tokens=0), "give 1 or more"),
        (Reading(window_s=math.inf), r"window of inf s: give 0 to 1e\+09"),
        (Reading(window_s=math.nan), "window of nan s"),
        (Reading(window_s=-1.0), "give 0 to"),
        (Reading(block_tokens=8), "ids cannot be converted"),
    ],
)
def test_options_out_of_range_are_refused(read, reading, message) -> None:
    with pytest.raises(TraceError, match=message):
        read(jsonl(SESSIONS), reading)


def test_a_block_size_that_contradicts_the_ids_is_refused(read) -> None:
    with pytest.raises(
        TraceError, match=r"traffic:1: 2 ids for 1000 tokens, but about 7\.8 blocks"
    ):
        read(GOOD, Reading(block_tokens=128))


@given(
    st.sampled_from(
        [
            GOOD,
            jsonl(SESSIONS),
            BURSTGPT,
            AZURE,
            RECORDED,
            TALK,
            gzip.compress(GOOD),
            USAGE,
            SPEND,
            SERVER,
        ]
    ),
    st.integers(0, 10**6),
    st.binary(max_size=4),
)
def test_a_file_damaged_at_any_offset_is_read_or_refused(
    tmp_path_factory, content, at, damage
) -> None:
    at %= len(content)
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content[:at] + damage + content[at + 2 :])
    with contextlib.suppress(TraceError):  # anything else is a fault of ours
        trace = load(path)
        assert trace.starts[-1] == len(trace.ids)
        assert (np.diff(trace.time_s) >= 0).all()
