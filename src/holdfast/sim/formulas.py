"""The closed formulas of context memory: fetch or recompute, gain in tokens per dollar, wear.

Pure functions of numbers and shapes; `holdfast size --explain` shows each at work, with the numbers
substituted.
"""

from __future__ import annotations

from holdfast.sim.model import ModelShape

SECONDS_PER_DAY = 86_400
GB = 1e9


def prefill_s(shape: ModelShape, new: int, context: int, flop_per_s: float) -> float:
    """Return the seconds to compute `new` tokens behind `context` at a sustained FLOP/s."""
    return shape.prefill_flop(new, context) / flop_per_s


def break_even_bytes_per_s(
    shape: ModelShape, tokens: int, flop_per_s: float, dtype: str = "bf16"
) -> float:
    """Return the bandwidth above which fetching a context is faster than computing it.

    Its KV bytes over the time of its prefill. What does not grow (windows, recurrent states) is
    left out, so the figure is of long contexts.
    """
    return tokens * shape.kv_bytes_per_token(dtype) / prefill_s(shape, tokens, 0, flop_per_s)


def fetch_rule_bytes_per_s(
    hidden: int, heads_per_kv_head: float, prefix: int, flop_per_s: float, dtype_bytes: float = 2
) -> float:
    """Return the bandwidth above which a prefix is worth fetching, by Mooncake's rule.

    Equation 2 of Mooncake (FAST'25): `B / G > 2 d s / (gqa (a p d + b d^2))` with a = 4 for
    attention (all pairs, of which causal attention has half) and b = 22 for the matrices of a
    Llama-shaped layer, at the peak of the GPUs.
    """
    attention, matrices = 4, 22
    flop = attention * prefix * hidden + matrices * hidden * hidden
    return flop_per_s * 2 * hidden * dtype_bytes / (heads_per_kv_head * flop)


def tokens_per_dollar_gain(
    hit: float, prefill_share: float, speed_up: float, storage_share: float
) -> float:
    """Return how many more tokens a dollar buys: .6 is 60 per cent more.

    `hit`: share of prefill work that is served from storage; `prefill_share`: share of GPU time
    that is prefill; `speed_up`: how many times faster a hit is than computing it;
    `storage_share`: cost of the storage over that of the GPUs.
    """
    saved = hit * prefill_share * (1 - 1 / speed_up)
    return 1 / (1 - saved) / (1 + storage_share) - 1


def drives_for_writes(bytes_per_s: float, drive_bytes: float, drive_writes_per_day: float) -> float:
    """Return how many drives it takes to write at this rate for ever, by their rated wear."""
    return bytes_per_s * SECONDS_PER_DAY / (drive_bytes * drive_writes_per_day)
