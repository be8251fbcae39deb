"""Claims about the time and money that KV reuse saves."""

from __future__ import annotations

from holdfast.sim.explain.claim import (
    HOLDS,
    HOLDS_IF,
    TOKENS_128K,
    TOKENS_128K_BINARY,
    CirculatingClaim,
    Explained,
)
from holdfast.sim.formulas import (
    GB,
    break_even_bytes_per_s,
    fetch_rule_bytes_per_s,
    tokens_per_dollar_gain,
)
from holdfast.sim.model import load_model

_H100_FLOP_PER_S = 989e12
_A100_FLOP_PER_S = 312e12


def _ttft_20x() -> Explained:
    shape = load_model("Llama-3.1-405B")
    low, high = (shape.kv_bytes_per_token() * n / GB for n in (TOKENS_128K, TOKENS_128K_BINARY))
    line = 2 * 100e9 / 8 / GB
    flop = shape.prefill_flop(TOKENS_128K_BINARY)
    recompute = 20 * high / line
    utilisation = flop / recompute / (8 * _H100_FLOP_PER_S)
    return Explained(
        (
            (
                f"KV {low:.1f} to {high:.1f} GB / {line:.0f} GB/s = {low / line:.2f} to "
                f"{high / line:.2f} s; 20 times that is {recompute:.0f} s"
            ),
            (
                f"prefill {flop:.3g} FLOP in {recompute:.0f} s on 8 x 989 TFLOP/s is "
                f"{utilisation:.0%} of the peak"
            ),
        ),
        {
            "load_s": high / line,
            "recompute_s": recompute,
            "flop": flop,
            "utilisation": utilisation,
        },
        HOLDS_IF,
        "at line rate, 41 per cent of peak FLOP/s, and a full hit compared with no hit",
    )


def _gpu_time_90() -> Explained:
    recompute = _ttft_20x().figures["recompute_s"]
    share = (0.1 - 1 / 20) / 0.9  # (T/20 + D) / (T + D) = 0.1 solved for D / T
    return Explained(
        (
            f"(T / 20 + D) / (T + D) = 0.1 gives a decode of D = {share:.3f} T",
            f"with T = {recompute:.0f} s that is {share * recompute:.1f} s of decode",
        ),
        {"decode_share": share, "decode_s": share * recompute},
        HOLDS_IF,
        "with about 3 s of decode, and if GPU time spent waiting for a load is not charged",
    )


def _tokens_per_dollar() -> Explained:
    gain = tokens_per_dollar_gain
    low, high = gain(0.4, 1, 20, 0), gain(0.6, 1, 20, 0)
    half = gain(0.4, 0.5, 20, 0.1), gain(0.6, 0.5, 20, 0.1)
    most = gain(0.4, 0.8, 20, 0), gain(0.6, 0.8, 20, 0)
    tenfold = gain(0.4, 1, 10, 0), gain(0.6, 1, 10, 0)
    return Explained(
        (
            "gain = 1 / (1 - hit x prefill share x (1 - 1/speed-up)) / (1 + storage cost) - 1",
            f"hit .4 and .6, all GPU time is prefill, 20x, storage free: {low:.0%} and {high:.0%}",
            f"as before, but a hit is 10x: {tenfold[0]:.0%} and {tenfold[1]:.0%}",
            (
                f"prefill is .5 of GPU time, storage costs .1 of the GPUs: {half[0]:.0%} and "
                f"{half[1]:.0%}"
            ),
            f"prefill is .8 of GPU time, storage free: {most[0]:.0%} and {most[1]:.0%}",
        ),
        {
            "low": low,
            "high": high,
            "half_low": half[0],
            "half_high": half[1],
            "most_low": most[0],
            "most_high": most[1],
            "tenfold_low": tenfold[0],
            "tenfold_high": tenfold[1],
        },
        HOLDS_IF,
        "only if the hit rate is a share of GPU time, prefill is all of it and storage is free",
    )


def _fetch_rule() -> Explained:
    hidden, grouping, prefix = 8192, 8, 8192
    older, newer = (
        fetch_rule_bytes_per_s(hidden, grouping, prefix, 8 * flop) / GB
        for flop in (_A100_FLOP_PER_S, _H100_FLOP_PER_S)
    )
    return Explained(
        (
            (
                "B / G > 2 d s / (gqa (a p d + b d^2)), a = 4, b = 22, d = 8,192, s = 2, gqa = 8, "
                "p = 8,192"
            ),
            f"8 x 312 TFLOP/s: {older:.1f} GB/s; 8 x 989 TFLOP/s: {newer:.1f} GB/s",
        ),
        {"a800_gb_per_s": older, "h800_gb_per_s": newer},
        HOLDS,
        "for an 8K prefix of a 70B at peak FLOP/s; at half the peak, half the bandwidth suffices",
    )


_BREAK_EVEN_MODELS = (
    "Llama-3.1-8B",
    "Llama-3.1-70B",
    "Llama-3.1-405B",
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
    "gpt-oss-120b",
    "DeepSeek-V3",
    "Kimi-K2",
)


def _break_even() -> Explained:
    lengths = (2048, 8192, 32_768, TOKENS_128K_BINARY)
    flop_per_s = 8 * _H100_FLOP_PER_S * 0.5
    figures: dict[str, float] = {}
    lines = ["KV bytes / prefill time on 8 H100 at half their peak, in GB/s at 2K, 8K, 32K, 128K:"]
    for name in _BREAK_EVEN_MODELS:
        shape = load_model(name)
        row = [break_even_bytes_per_s(shape, tokens, flop_per_s) / GB for tokens in lengths]
        figures |= {f"{name} {n}": value for n, value in zip(lengths, row, strict=True)}
        lines.append(f"{name:<16}" + "".join(f"{value:7.1f}" for value in row))
    return Explained(
        tuple(lines),
        figures,
        HOLDS_IF,
        "small sparse models with grouped heads need DRAM, models with latent attention only a "
        "disk; a busy GPU lowers the break-even, a busy link raises it",
    )


CLAIMS = (
    CirculatingClaim(
        "ttft-20x",
        "20 times sooner to the first token: 405B, 128K, 8 Hopper GPUs, 2 x 100 Gb/s",
        _ttft_20x,
    ),
    CirculatingClaim("gpu-time-90", "90 per cent less GPU time", _gpu_time_90),
    CirculatingClaim(
        "tokens-per-dollar",
        "60 to 130 per cent more tokens per dollar at 40 to 60 per cent hits",
        _tokens_per_dollar,
    ),
    CirculatingClaim(
        "fetch-rule", "A prefix is worth fetching above 6 GB/s (8 A800), 19 (8 H800)", _fetch_rule
    ),
    CirculatingClaim(
        "break-even", "Fetching context is always faster than computing it again", _break_even
    ),
)
