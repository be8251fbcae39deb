"""Requests of a trace that names no content: every block is new, unless a session resends it.

Such a trace says when requests came and how long they were. Where it says which belong to one
session, a request at least as long as the request before it and its answer is taken to start with
both; a shorter one starts anew. Nothing is shared between sessions, so hits are a lower bound.
"""

from __future__ import annotations

import math

import numpy as np

from holdfast.sim.formats.rows import Reading, Rows
from holdfast.sim.trace import UNKNOWN, Trace, arrange

BLOCK_TOKENS = 64


def made_up(rows: Rows, reading: Reading) -> Trace:
    """Give every request ids for its full blocks, and make the trace."""
    size = reading.block_tokens or BLOCK_TOKENS
    requests = rows.requests()
    rows.refuse_too_many(requests.input_tokens // size)
    requests = requests.taken(np.argsort(requests.time_s, kind="stable"))
    chains: dict[int, list[int]] = {}
    history: dict[int, int] = {}
    unused = 0
    for session, tokens, answer in zip(
        requests.session.tolist(),
        requests.input_tokens.tolist(),
        requests.output_tokens.tolist(),
        strict=True,
    ):
        resent = chains[session] if tokens >= history.get(session, math.inf) else []
        fresh = tokens // size - len(resent)
        chain = [*resent, *range(unused, unused + fresh)]
        unused += fresh
        rows.chain(chain)
        if session != UNKNOWN:
            chains[session], history[session] = chain, tokens + answer
    return arrange(rows.source.name, size, requests, *rows.blocks())._replace(content=False)
