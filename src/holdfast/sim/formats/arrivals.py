"""Made-up block ids for a trace with arrival times and lengths only.

A request of a session is assumed to start with the session's previous prompt and answer if it is at
least as long as both; otherwise all its blocks are new. Sessions share no blocks, so hits are a
lower bound.
"""

from __future__ import annotations

import math

import numpy as np

from holdfast.sim.formats.rows import Reading, Rows
from holdfast.sim.trace import UNKNOWN, Trace, arrange

BLOCK_TOKENS = 64


def with_made_up_ids(rows: Rows, reading: Reading) -> Trace:
    """Return the trace of these requests, with made-up ids for their full blocks."""
    size = reading.block_tokens or BLOCK_TOKENS
    requests = rows.requests()
    rows.check_block_counts(requests.input_tokens // size)
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
