"""Hints in a request reach the node: at its beginning, with its blocks, and when it ends."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from holdfast.client.request_hints import NO_HINT, RequestHint, at_end
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.scheduler import SchedulerSide
from holdfast.engines.vllm.transfer_params import hint_of
from holdfast.engines.vllm.work import GroupHandshake, Handshake
from holdfast.wire.local.messages import (
    Closed,
    Cover,
    Covered,
    Done,
    Hinted,
    Observed,
    Pin,
    Returns,
    Sync,
)

BLOCK = 8
SETTING = ConnectorSettings("", "default", 0, "", 0.05, 5.0, saves=True)


@pytest.fixture
def client(fakes):
    covered = Covered(0, 0, {})
    return fakes.Client(lambda message: covered if isinstance(message, Cover) else Done())


@pytest.fixture
def side(fakes, client):
    links, namespace = (
        [fakes.Link(client)],
        Handshake((GroupHandshake(b"f" * 16, 64, BLOCK, BLOCK),)),
    )
    return SchedulerSide(links, [namespace], SETTING, fakes.Teller(links))


def asked(fakes, side, said, **other):
    """Let a request of 20 tokens arrive, be computed and end; return what was saved."""
    params = {"holdfast": said} if said is not None else None
    request = fakes.Request(tokens=list(range(20)), kv_transfer_params=params, **other)
    side.on_new_request(request)
    side.matched_tokens(request, 0)
    work = side.build_work(fakes.step({"r": [1, 2, 3]}, r=20))
    side.on_finished(request)
    return work.saves


def test_the_first_lookup_carries_the_session_of_the_hint(fakes, client, side):
    asked(fakes, side, {"session": "chat-7"})
    assert [cover.session for cover in client.of(Cover)] == ["chat-7"]


@pytest.mark.parametrize("said", [{"session": "\ud800"}, {"a\nWARNING b": 1}, "x", 7])
def test_a_malformed_hint_logs_one_printable_line(fakes, client, side, caplog, said):
    assert asked(fakes, side, said)
    assert [cover.session for cover in client.of(Cover)] == [""]
    [line] = caplog.messages
    assert line.isprintable()


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ({"bypass": True}, {}),
        ({"bypass": True, "sessions": "chat-7"}, {"bad_hints": 1}),
        ({"bypass": "yes"}, {"bad_hints": 1}),
    ],
)
def test_a_request_with_bypass_is_neither_looked_up_nor_saved(fakes, client, side, said, counted):
    """Even where the rest of its hint makes no sense: it may be there to keep a secret."""
    assert asked(fakes, side, {**said, "pin_s": 5}) == []
    assert client.sent == []
    assert side.counts.data == {"declined_requests/bypass": 1, **counted}


def test_an_image_name_first_used_by_a_request_with_bypass_has_no_other_content(
    fakes, client, side
):
    """vLLM's own cache keeps the pages of the first request under the image's name."""

    def shown(value):
        pixels = SimpleNamespace(data=torch.full((4,), value))
        place = SimpleNamespace(offset=0, length=8)
        return [
            SimpleNamespace(
                data={"pixels": pixels}, identifier="a" * 64, modality="image", mm_position=place
            )
        ]

    asked(fakes, side, {"bypass": True}, mm_features=shown(1.0))
    assert asked(fakes, side, None, mm_features=shown(2.0)) == []
    assert client.sent == []
    assert side.counts.data == {"declined_requests/bypass": 1, "declined_requests/multimodal": 1}


@pytest.mark.parametrize("said", [{"bypass": False}, {"bypass": False, "sessions": "chat-7"}])
def test_a_request_with_bypass_false_is_saved(fakes, client, side, said):
    assert asked(fakes, side, said)
    assert len(client.of(Cover)) == 1


def test_a_salt_with_a_lone_surrogate_separates_blocks(fakes, client, side):
    asked(fakes, side, None, cache_salt="\ud800")
    asked(fakes, side, None, cache_salt="")
    first, second = client.of(Cover)
    assert first.keys != second.keys


def test_the_first_lookup_carries_the_session_id_of_the_engine(fakes, client, side):
    asked(fakes, side, None, session_id="chat-8")
    assert [cover.session for cover in client.of(Cover)] == ["chat-8"]


def test_saves_carry_the_retention_of_the_hint(fakes, side):
    saves = asked(fakes, side, {"retention": "durable"})
    assert [save.retention for save in saves] == ["durable"]


def test_returns_and_pin_are_sent_when_a_request_ends(fakes, client, side):
    (save,) = asked(fakes, side, {"session": "chat-7", "returns_in_s": 20, "pin_s": 5})
    (keys,) = save.keys
    assert client.of(Returns) == [Returns("chat-7", 20.0, keys)]
    assert client.of(Pin) == [Pin(keys, 5.0)]
    assert client.forgotten[-2:] == [*client.of(Returns), *client.of(Pin)], "nobody waits"


def test_a_closed_session_does_not_return(fakes, client, side):
    asked(fakes, side, {"session": "chat-7", "returns_in_s": 20, "closed": True})
    assert client.of(Closed) == [Closed("chat-7")]
    assert client.of(Returns) == []


def test_a_request_without_hints_sends_no_hint_messages(fakes, client, side):
    asked(fakes, side, None)
    assert {type(message) for message in client.sent} == {Cover, Observed}


def test_the_end_of_a_hinted_request_ignores_a_node_that_is_gone(fakes, client, side):
    request = fakes.Request(
        tokens=list(range(20)), kv_transfer_params={"holdfast": {"session": "a", "closed": True}}
    )
    side.on_new_request(request)
    client.gone = True
    side.on_finished(request)


@pytest.mark.parametrize(
    "said",
    ["chat-7", {"chat": "a"}, {"retention": "forever"}, {"returns_in_s": -1}, {"pin_s": 1e9}],
)
def test_an_invalid_hint_is_logged_counted_and_ignored(fakes, client, side, caplog, said):
    with caplog.at_level(logging.WARNING, "vllm.holdfast"):
        asked(fakes, side, said)
    assert "kv_transfer_params.holdfast is ignored" in caplog.text
    assert side.counts.data["bad_hints"] == 1
    assert {type(message) for message in client.sent} == {Cover, Observed}


def test_params_of_other_connectors_are_not_hints(fakes):
    request = fakes.Request(kv_transfer_params={"do_remote_prefill": True})
    assert hint_of(request) == (NO_HINT, True)


def test_pin_needs_blocks_and_returns_needs_a_session():
    assert at_end(RequestHint(pin_s=5), b"") == []
    assert at_end(RequestHint(returns_in_s=5), b"k" * 16) == []


def test_a_durable_request_is_acknowledged_in_the_counts_and_in_its_response(fakes):
    def answer(message):
        if isinstance(message, Cover):
            return Covered(0, 0, {})
        return Hinted(len(message.keys) // 16) if isinstance(message, Sync) else Done()

    client = fakes.Client(answer)
    links, namespace = (
        [fakes.Link(client)],
        Handshake((GroupHandshake(b"f" * 16, 64, BLOCK, BLOCK),)),
    )
    side = SchedulerSide(links, [namespace], SETTING, fakes.Teller(links))
    params = {"holdfast": {"retention": "durable"}}
    request = fakes.Request(tokens=list(range(20)), kv_transfer_params=params)
    side.on_new_request(request)
    side.matched_tokens(request, 0)
    assert side.build_work(fakes.step({"r": [1, 2, 3]}, r=20)).saves
    for _ in range(2):
        side.build_work(fakes.step({"r": [1, 2, 3]}))
    told = side.on_finished(request)["holdfast"]
    assert (told["tokens"], told["durable_tokens"]) == (16, 16)
    assert side.counts.data["durable_blocks/kept"] == 2
    assert [len(sync.keys) // 16 for sync in client.of(Sync)] == [2]


def test_a_session_request_asks_for_no_acknowledgement(fakes, client, side):
    assert asked(fakes, side, {"retention": "session"})
    assert client.of(Sync) == []
