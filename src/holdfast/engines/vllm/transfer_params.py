"""`kv_transfer_params`: the hints of a request, and what a proxy of prefill and decode gets.

    {"kv_transfer_params": {"holdfast": {"session": "chat-7", "returns_in_s": 20}}}

A proxy asks with `do_remote_decode` or `do_remote_prefill` whether a context was transferred. The
answer is in the `kv_transfer_params` of the response. The proxy may pass it on to the other engine,
which needs none of it: the engine finds the blocks by the tokens of the prompt.
"""

from __future__ import annotations

import logging
from typing import Any

from holdfast.client.request_hints import RequestHint, parse_hint
from holdfast.client.tracked_request import TrackedRequest

FIELD = "holdfast"
"""The field of `kv_transfer_params` that is ours."""

_ASKING = ("do_remote_decode", "do_remote_prefill")

_log = logging.getLogger("vllm.holdfast")


def hint_of(request: Any) -> tuple[RequestHint, bool]:
    """Return a request's hints, and whether they are valid; of invalid ones only `bypass`."""
    raw = (getattr(request, "kv_transfer_params", None) or {}).get(FIELD)
    hint, fault = parse_hint(raw, str(getattr(request, "session_id", None) or ""))
    if fault:
        _log.warning("kv_transfer_params.%s is ignored: %s", FIELD, fault)
    return hint, not fault


def is_asked(request: Any) -> bool:
    """Whether a request asks what is transferred."""
    params = getattr(request, "kv_transfer_params", None) or {}
    return any(params.get(name) for name in _ASKING)


def transfer_params(tracked: TrackedRequest | None, durable: int | None = None) -> dict[str, Any]:
    """Return the parameters; `tracked` None: the node is away, or the request is not served.

    `tokens`: leading tokens of the prompt in blocks that the node holds or that workers are saving.
    `chain`: name of the last of these blocks; engines that share contexts return the same one. Of a
    durable request, `durable_tokens`: those of the `durable` leading blocks that are known to be on
    the durable tier, of which every KV group has what a resume needs.
    """
    blocks, size, unit, chain = 0, 0, 0, ""
    if tracked is not None:
        size, unit = tracked.chains[0].block_tokens, tracked.unit_tokens
        blocks = min(tracked.saved, len(tracked.request.prompt_token_ids) // size)
        if blocks:
            chain = tracked.keys(blocks - 1, blocks)[0].hex()
    # No other key: vLLM's MultiConnector ends the engine if two connectors return the same one.
    params: dict[str, Any] = {"tokens": blocks * size, "chain": chain}
    if durable is not None:
        params["durable_tokens"] = durable * unit
    return {FIELD: params}
