"""What a proxy of prefill and decode is told: how much of a prompt the other engine can load."""

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from holdfast.client.prompt_ledger import PromptLedger
from holdfast.engines.vllm.connector import HoldfastConnector
from holdfast.engines.vllm.transfer_params import hint_of

BLOCK = 8
PREFILL, DECODE = {"do_remote_decode": True}, {"do_remote_prefill": True}


def computed(harness, tokens, params, **other):
    """Let a request arrive, compute and end; return its request and what the proxy gets."""
    request = harness.request(tokens, kv_transfer_params=params, **other)
    harness.side.matched_tokens(request, 0)
    harness.run(request, tokens, list(range(1, 2 + tokens // BLOCK)))
    return harness.side.on_finished(request)


def chain_name(harness, tokens):
    return harness.chain(tokens).keys[-1].hex()


@pytest.fixture
def harness(fakes):
    return fakes.SchedulerRig(fakes)


@pytest.mark.parametrize("held", [0, 1])
def test_a_prefill_returns_the_tokens_and_the_chain_that_the_node_holds(harness, held):
    harness.held = held
    params = computed(harness, 20, PREFILL)
    assert params == {"holdfast": {"tokens": 16, "chain": chain_name(harness, 16)}}


def test_prefill_and_decode_return_the_same_params_for_the_same_prompt(fakes):
    prefill, decode = (
        fakes.SchedulerRig(fakes, setting=fakes.setting(**role))
        for role in ({"loads": False}, {"saves": False})
    )
    decode.held = 2
    said = computed(prefill, 20, None)  # a producer always says it
    # A proxy may pass on what it got: it is no hint, and no wrong one.
    assert computed(decode, 20, {**DECODE, **said}) == said
    assert decode.side.counts.data.get("bad_hints") is None


def test_a_request_without_remote_decode_returns_no_params(harness):
    for params in (None, {}, {"do_remote_decode": False}, {"holdfast": {"session": "chat-7"}}):
        assert computed(harness, 20, params) is None


def test_a_transfer_without_held_blocks_returns_zero_tokens(fakes, harness):
    nothing = {"holdfast": {"tokens": 0, "chain": ""}}
    assert computed(harness, BLOCK - 1, PREFILL) == nothing
    assert computed(harness, 20, {**PREFILL, "holdfast": {"bypass": True}}) == nothing
    away = fakes.SchedulerRig(fakes)
    request = away.request(20, kv_transfer_params=PREFILL)
    away.run(request, 20, [1, 2, 3])
    away.links[0].current = None
    assert away.side.on_finished(request) == nothing


def test_two_nodes_behind_a_multi_connector_return_one_set_of_params(fakes):
    ledger, both = PromptLedger(), object.__new__(MultiConnector)
    both._connectors, both._requests_to_connector = [], {}
    for _ in range(2):
        connector = object.__new__(HoldfastConnector)
        connector._role = KVConnectorRole.SCHEDULER
        connector._scheduler = fakes.SchedulerRig(fakes, ledger=ledger).side
        both._connectors.append(connector)
    request = fakes.Request(tokens=list(range(20)), kv_transfer_params=PREFILL)
    both._all_support_hma = True
    assert both.request_finished_all_groups(request, ([1],)) == (
        False,
        {"holdfast": {"tokens": 0, "chain": ""}},
    )


def test_too_long_params_from_a_proxy_are_refused(fakes):
    request = fakes.Request(kv_transfer_params={"holdfast": {"tokens": 16, "chain": "a" * 5_000}})
    assert not hint_of(request)[1]
