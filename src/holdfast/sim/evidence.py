"""What a trace can prove: its times and content are checked before a verdict, gaps are stated."""

from __future__ import annotations

import numpy as np

from holdfast.errors import ConfigError
from holdfast.sim.model.shape import ModelShape
from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import TIME_DECIMALS, Trace

RATE_MIN, RATE_MAX = 1e-9, 1e9
"""Requests per second that may be asked for."""


def check_reuse(trace: Trace) -> Reuse:
    """Return the reuse of a trace. Raises ConfigError if the trace does not say what is reused."""
    if not trace.requests or not trace.blocks:
        raise ConfigError(
            f"trace {trace.name}: has no block ids, so its reuse is unknown; use another trace, or "
            "`holdfast size` with --users and --context"
        )
    runs = reuse(trace)
    if not trace.content and not len(runs.request):
        raise ConfigError(
            f"trace {trace.name}: has lengths of requests, but no content, so its reuse is "
            "unknown; use a trace with block ids or texts, or `holdfast size` with --users and "
            "--context"
        )
    return runs


def check_times(trace: Trace) -> None:
    """Raise ConfigError if a trace has no arrival times."""
    if trace.untimed:
        stated = "".join(f"; {note}" for note in block_notes(trace))
        raise ConfigError(
            f"trace {trace.name}: {trace.untimed}, so nothing that depends on arrival times is "
            f"known: waiting, costs, wear; add --rate N, the requests a second to assume{stated}"
        )


def check_own_rate(trace: Trace) -> None:
    """Raise ConfigError if the mean rate of a trace is unknown."""
    check_times(trace)
    if not trace.span_s:
        raise ConfigError(
            f"trace {trace.name}: all its requests have one time, so their rate is unknown; add "
            "--rate N, the requests a second"
        )


def paced(trace: Trace, requests_per_s: float) -> Trace:
    """Return a trace at another mean rate; a trace without times gets evenly spaced ones.

    Think times stay as they are. Raises ConfigError for a rate out of range.
    """
    check_rate(requests_per_s)
    number = np.arange(trace.requests)
    if trace.untimed:
        remark = (
            f"{trace.untimed}, so its requests arrive evenly, {requests_per_s:g} a second, in the "
            "order of the file"
        )
        time_s = np.round(number / requests_per_s, TIME_DECIMALS)
        return trace._replace(time_s=time_s, untimed="", remarks=(*trace.remarks, remark))
    if not trace.span_s:
        raise ConfigError(
            f"--rate: {requests_per_s:g}: all requests of trace {trace.name} have one time, which "
            "no rate changes; omit it"
        )
    factor = (trace.requests - 1) / trace.span_s / requests_per_s
    remark = (
        f"its times are {factor:.3g} times as far apart, for {requests_per_s:g} requests a second"
    )
    time_s = np.round(trace.time_s * factor, TIME_DECIMALS)
    return trace._replace(time_s=time_s, remarks=(*trace.remarks, remark))


def check_rate(requests_per_s: float) -> None:
    """Raise ConfigError if a rate is out of range."""
    if not RATE_MIN <= requests_per_s <= RATE_MAX:
        raise ConfigError(
            f"--rate: {requests_per_s:g}: give {RATE_MIN:g} to {RATE_MAX:g} requests a second"
        )


def without_longer(trace: Trace, model: ModelShape) -> Trace:
    """Return a trace without the requests that exceed the model's maximum context.

    Raises ConfigError if none is left.
    """
    if not model.context_max:
        return trace
    kept = trace.input_tokens <= model.context_max
    dropped = trace.requests - int(kept.sum())
    if not dropped:
        return trace
    if dropped == trace.requests:
        raise ConfigError(
            f"--drop-longer: all {dropped:,} requests of {trace.name} are longer than the "
            f"{model.context_max:,} tokens of {model.name}; name another model"
        )
    share = float(trace.input_tokens[~kept].sum() / trace.input_tokens.sum())
    remark = (
        f"{dropped:,} of its {trace.requests:,} requests ({share:.1%} of the input) are dropped, "
        f"because they are longer than the {model.context_max:,} tokens of {model.name}"
    )
    return trace.select(kept)._replace(remarks=(*trace.remarks, remark))


def block_notes(trace: Trace) -> list[str]:
    """Return a sentence if the block size is a guess."""
    if not trace.other_block_tokens:
        return []
    others = " or ".join(f"{size:,}" for size in trace.other_block_tokens)
    note = (
        f"blocks of {trace.block_tokens} tokens are assumed; blocks of {others} tokens fit as well"
    )
    return [f"{note} and give other hits: give the size with --block-tokens"]


def trace_notes(trace: Trace) -> list[str]:
    """Return what a trace leaves open and what was assumed instead, one sentence for each."""
    notes = block_notes(trace)
    if trace.composed:
        notes.append(
            "its sessions start at random times within a window; what they share is unknown unless "
            "their ids are global, so hits may be higher"
        )
    if not trace.content:
        notes.append("reuse is known within its sessions only, so hits may be higher")
    return [f"trace {trace.name}: {note}" for note in (*notes, *trace.remarks)]
