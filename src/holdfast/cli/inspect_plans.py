"""`holdfast inspect plans`: a node's recent plans, their reasons and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.cli.options import many
from holdfast.errors import NotFollowed

_SHORT_S = 0.1
_TINY_S = 1e-4
"""Times below these are shown in milliseconds and microseconds."""

_MINUTES_FROM_S = 120.0
_GB, _MB = 1e9, 1e6
_SLOW_GB_PER_S = 0.1
_CONTEXT_TOKENS = 1_000

_NOT_FOLLOWED = {
    NotFollowed.HAD: "the engine had more than it had reported",
    NotFollowed.LOST: "the engine had less than it had reported",
    NotFollowed.LATE: "the engine did not wait for the answer",
    NotFollowed.NOT_FETCHED: "the engine requested no fetch",
    NotFollowed.PREEMPTED: "the engine preempted the request",
    NotFollowed.ENDED: "the request ended before its first token",
    NotFollowed.RESET: "the engine reset its caches",
    NotFollowed.GONE: "the connection to the engine ended",
}


def plans_text(answer: Mapping[str, Any]) -> str:
    """Return the node's answer to `Plans` as lines: estimates first, then plans, newest first."""
    lines = [
        *map(_tier, answer["tiers"]),
        *map(_engine, answer["engines"]),
        *_right(answer["right"]),
    ]
    plans = [line for plan in answer["plans"] for line in _plan(plan)]
    return "\n".join([*lines, "", *(plans or ["nothing was planned yet"])])


def _tier(tier: Mapping[str, Any]) -> str:
    queued = f", {tier['queued_bytes'] / 2**20:.0f} MiB queued" if tier["queued_bytes"] else ""
    seen = many(tier["reads"], "read") if tier["reads"] else "assumed, not read yet"
    return (
        f"  {tier['tier']:<8} {_speed(tier['bytes_per_s'])} after {_time(tier['latency_s'])}"
        f"{queued} ({seen})"
    )


def _engine(engine: Mapping[str, Any]) -> str:
    name, cost = f"  {engine['engine']} {engine['fingerprint'][:8]}", engine["cost"]
    if cost is None:
        return f"{name}: has not reported how fast it computes"
    more_s = cost["c"] * _CONTEXT_TOKENS
    return (
        f"{name}: {_time(cost['b'])} a token, {_time(more_s)} more a token for every "
        f"{_CONTEXT_TOKENS:,} tokens before it, {_time(cost['a'])} a step "
        f"({many(engine['steps'], 'step')})"
    )


def _right(right: Mapping[str, Any]) -> Iterator[str]:
    if right["ended"]:
        yield (
            f"  {right['within_25_percent']} of {many(right['ended'], 'plan')} within 25 % of what "
            f"was expected, half of them within {100 * right['median_error']:.0f} %; "
            f"{right['late']} late"
        )
    else:
        yield "  no plan with an expectation has ended yet"
    if right.get("not_followed"):
        yield f"  {many(right['not_followed'], 'plan')} not carried out, and not counted"


def _plan(plan: Mapping[str, Any]) -> Iterator[str]:
    tokens = f"{plan['prompt_tokens']:,} tokens" if plan["prompt_tokens"] else "some tokens"
    have = f", {plan['have_tokens']:,} there" if plan["have_tokens"] else ""
    age = plan["age_s"]
    ago = f"{age:.0f} s" if age < _MINUTES_FROM_S else f"{age / 60:.0f} min"
    yield f"#{plan['plan']} {ago} ago, {plan['engine']}, {tokens}{have}: {plan['reason']}"
    outcome = list(_outcome(plan))
    if outcome:
        yield "    " + "; ".join(outcome)


def _outcome(plan: Mapping[str, Any]) -> Iterator[str]:
    expected, actual, why = plan["expected"], plan["actual"], plan.get("not_followed")
    if why:
        yield f"not carried out: {_NOT_FOLLOWED.get(why, 'the engine did something else')}"
    if actual["fetched_s"] is not None:
        yield (
            f"{many(plan['landed_blocks'], 'block')} in {_time(actual['fetched_s'])} "
            f"(expected {_time(expected['fetched_s'])}, {plan['outcome']})"
        )
    if actual["first_token_s"] is not None:
        counts = plan["recompute_s"] and not why
        estimate = f" (expected {_time(expected['first_token_s'])})" if counts else ""
        yield f"first token after {_time(actual['first_token_s'])}{estimate}"


def _speed(bytes_per_s: float) -> str:
    if bytes_per_s < _SLOW_GB_PER_S * _GB:
        return f"{bytes_per_s / _MB:.3g} MB/s"
    return f"{bytes_per_s / _GB:.2f} GB/s"


def _time(seconds: float) -> str:
    rounded = float(f"{seconds:.2g}")  # before the unit is chosen: 99.9 ms are 0.10 s
    if rounded >= _SHORT_S:
        return f"{seconds:.2f} s"
    if 0 < rounded < _TINY_S:
        return f"{1e6 * rounded:.2g} us"
    return f"{1000 * rounded:.2g} ms"
