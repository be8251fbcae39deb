"""Write a trace as lines of Mooncake's format, which have no text and which other tools read."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from holdfast.sim.trace import UNKNOWN, Trace

_MS = 1e3


def mooncake_lines(trace: Trace) -> Iterator[str]:
    """Yield one line for each request, in order of arrival.

    A trace without times has no `timestamp`, and one without content has no `hash_ids`. Ids are
    numbers in order of first use, so they reveal nothing but which blocks are equal. Think times
    are not in the format.
    """
    for request in range(trace.requests):
        line: dict[str, object] = {}
        if not trace.untimed:
            line["timestamp"] = round(float(trace.time_s[request]) * _MS, 3)
        line["input_length"] = int(trace.input_tokens[request])
        line["output_length"] = int(trace.output_tokens[request])
        if trace.session[request] != UNKNOWN:
            line["session_id"] = int(trace.session[request])
        if trace.content:
            line["block_size"] = trace.block_tokens
            line["hash_ids"] = trace.chain(request).tolist()
        yield msgspec.json.encode(line).decode() + "\n"
