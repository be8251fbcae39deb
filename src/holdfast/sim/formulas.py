"""Closed formulas: fetch or recompute, tokens per dollar, drive wear.

Pure functions; `holdfast size --explain` shows each with numbers substituted.
"""

from __future__ import annotations

from holdfast.sim.model.shape import ModelShape

SECONDS_PER_DAY = 86_400
HOURS_PER_YEAR = 8_760.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
GB = 1e9
TB = 1e12


def break_even_bytes_per_s(shape: ModelShape, tokens: int, flop_per_s: float) -> float:
    """Return the bandwidth above which fetching a context is faster than computing it.

    This is its KV bytes in bf16 divided by its prefill time at a sustained `flop_per_s`. Windows
    and recurrent states do not grow with the context and are left out: the result is for long
    contexts.
    """
    return tokens * shape.kv_bytes_per_token() / (shape.prefill_flop(tokens) / flop_per_s)


def fetch_rule_bytes_per_s(
    hidden: int, heads_per_kv_head: float, prefix: int, flop_per_s: float
) -> float:
    """Return the bandwidth above which a prefix is worth fetching, by Mooncake's rule.

    Equation 2 of Mooncake (FAST'25): `B / G > 2 d s / (gqa (a p d + b d^2))` with a = 4 for
    attention over all pairs (causal attention has half of them) and b = 22 for the matrices of a
    Llama layer, at the GPUs' peak FLOP/s.
    """
    attention, matrices, element_bytes = 4, 22, 2
    flop = attention * prefix * hidden + matrices * hidden * hidden
    return flop_per_s * 2 * hidden * element_bytes / (heads_per_kv_head * flop)


def tokens_per_dollar_gain(
    hit: float, prefill_share: float, speed_up: float, storage_share: float
) -> float:
    """Return the gain in tokens per dollar: 0.6 is 60 per cent more.

    `hit`: share of prefill work that is served from storage; `prefill_share`: share of GPU time
    that is prefill; `speed_up`: time to compute a hit divided by the time to fetch it;
    `storage_share`: cost of the storage divided by the cost of the GPUs.
    """
    saved = hit * prefill_share * (1 - 1 / speed_up)
    return 1 / (1 - saved) / (1 + storage_share) - 1


def drives_for_writes(bytes_per_s: float, drive_bytes: float, drive_writes_per_day: float) -> float:
    """Return the number of drives whose rated wear sustains this write rate."""
    return bytes_per_s * SECONDS_PER_DAY / (drive_bytes * drive_writes_per_day)
