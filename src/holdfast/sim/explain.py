"""Published claims about context memory, recomputed: which hold, and under which assumptions.

Each claim has a function that returns its calculation, with numbers substituted, and a verdict. The
calculations use published model configs and formulas only, not the claims' sources.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import ConfigError
from holdfast.sim.amounts import GB, SECONDS_PER_DAY, TB
from holdfast.sim.model.catalogue import load_model
from holdfast.sim.model.shape import DTYPE_BYTES

TOKENS_128K = 128_000
TOKENS_128K_BINARY = 131_072

_H100_FLOP_PER_S = 989e12
_A100_FLOP_PER_S = 312e12

HOLDS = "holds"
HOLDS_IF = "holds under its assumption only"
FAILS = "does not reproduce"


class Explained(NamedTuple):
    """The result for a claim: the calculation, figures by name, verdict and its reason."""

    calculation: str
    figures: dict[str, float]
    verdict: str
    because: str


class CirculatingClaim(NamedTuple):
    """A published claim, with a short name and the function that recomputes it."""

    name: str
    says: str
    work_out: Callable[[], Explained]


CLAIMS: list[CirculatingClaim] = []
"""All claims, in the order of this file."""


def find_claim(name: str) -> CirculatingClaim:
    """Return a claim by its name. Raises ConfigError with similar names."""
    known = {claim.name: claim for claim in CLAIMS}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, 3, 0.4) or list(known)
    raise ConfigError(
        f"claim {name!r}: not known; try {', '.join(close)}, or --explain without a name for all"
    )


def _claim(name: str, says: str) -> Callable[[Callable[[], Explained]], Callable[[], Explained]]:
    """Register the decorated function as the calculation of a claim."""

    def register(work_out: Callable[[], Explained]) -> Callable[[], Explained]:
        CLAIMS.append(CirculatingClaim(name, says, work_out))
        return work_out

    return register


@_claim("context-70b", "One request of Llama-3-70B at 128K tokens is about 42 GB")
def _context_70b() -> Explained:
    shape = load_model("Llama-3.1-70B")
    per_token = shape.kv_bytes_per_token()
    low, high = per_token * TOKENS_128K / GB, per_token * TOKENS_128K_BINARY / GB
    return Explained(
        f"2 x 80 layers x 8 KV heads x 128 x 2 bytes = {per_token:,.0f} bytes a token\n"
        f"x 128,000 tokens = {low:.1f} GB; x 131,072 = {high:.1f} GB",
        {"per_token": per_token, "gb": low, "gb_binary": high},
        HOLDS,
        "in bf16, with 128K = 128,000; the model is Llama 3.1, since Llama 3 ends at 8K",
    )


@_claim("half-h100", "That is over half of an 80 GB H100")
def _half_h100() -> Explained:
    per_token = load_model("Llama-3.1-70B").kv_bytes_per_token()
    low, high = per_token * TOKENS_128K / (80 * GB), per_token * TOKENS_128K_BINARY / (80 * GB)
    return Explained(
        f"41.9 / 80 = {low:.1%}; 42.9 / 80 = {high:.1%}",
        {"share": low, "share_binary": high},
        HOLDS,
        "of the nominal memory; weights and activations also need part of it",
    )


@_claim("token-405b", "Llama-3.1-405B takes 516 KB a token")
def _token_405b() -> Explained:
    per_token = load_model("Llama-3.1-405B").kv_bytes_per_token()
    return Explained(
        f"2 x 126 layers x 8 KV heads x 128 x 2 bytes = {per_token:,.0f} bytes",
        {"per_token": per_token},
        HOLDS,
        "exactly, in bf16 and decimal KB",
    )


@_claim("token-qwen72b", "Qwen2.5-72B takes 327 KB a token")
def _token_qwen72b() -> Explained:
    per_token = 2 * 80 * 8 * 128 * 2
    return Explained(
        f"2 x 80 layers x 8 KV heads x 128 x 2 bytes = {per_token:,} bytes",
        {"per_token": per_token},
        HOLDS_IF,
        "exactly, with 80 layers and 8 KV heads of 128; its config is not shipped",
    )


@_claim("mla-17x", "Latent attention with fp8 takes 135 GB down to 8 GB, about 17x")
def _mla_17x() -> Explained:
    dense, latent = load_model("Llama-3.1-405B"), load_model("DeepSeek-V3")
    fp8 = latent.kv_bytes_per_token("fp8")
    tokens = 8 * GB / fp8
    at = 262_144
    plain = 2 * 61 * 128 * (192 + 128) / 2 * 2  # keys of 192, values of 128, 128 heads, bf16
    ratio = plain / latent.kv_bytes_per_token()
    bf16 = latent.kv_bytes_per_token() * TOKENS_128K / GB
    return Explained(
        f"latent attention in fp8: 61 x 576 x 1 = {fp8:,.0f} bytes, so 8 GB is "
        f"{tokens:,.0f} tokens; in bf16 128K tokens are {bf16:.1f} GB\n"
        f"135 GB is Llama-3.1-405B at {at:,} tokens: "
        f"{dense.kv_bytes_per_token() * at / GB:.1f} GB; there the latent takes "
        f"{fp8 * at / GB:.1f} GB\n"
        f"DeepSeek-V3 with 128 heads of its own would take {plain / 1e6:.1f} MB a token "
        f"({plain * TOKENS_128K_BINARY / GB:,.0f} GB at 131,072): {ratio:.0f} latents",
        {
            "tokens_in_8_gb": tokens,
            "dense_gb": dense.kv_bytes_per_token() * at / GB,
            "latent_gb": fp8 * at / GB,
            "against_itself": ratio,
            "latent_bf16_gb": bf16,
        },
        FAILS,
        "no config gives both figures at one length; two different models are compared",
    )


@_claim("compression", "Grouped or latent attention with fp8 or fp4 saves 4x to 40x")
def _compression() -> Explained:
    grouped = 64 / 8
    latent = _mla_17x().figures["against_itself"]
    return Explained(
        f"grouped heads of a 70B: 64 / 8 = {grouped:.0f}x; latent against its own full "
        f"heads {latent:.0f}x\n"
        "fp8 against bf16 2x, fp4 4x",
        {"grouped": grouped, "latent": latent},
        HOLDS_IF,
        "as an order of magnitude: the ratio depends on the two layouts compared",
    )


@_claim("mla-preset", "DeepSeek-V3 takes 1,749,384 bytes a token (a benchmark preset)")
def _mla_preset() -> Explained:
    shape = load_model("DeepSeek-V3")
    hidden = 7168
    preset, true = 2 * 61 * hidden * 2, shape.kv_bytes_per_token()
    return Explained(
        f"2 x 61 layers x {hidden} x 2 bytes = {preset:,} bytes, if every head were kept\n"
        f"61 layers x (512 + 64) x 2 bytes = {true:,.0f} bytes: {preset / true:.0f} times less",
        {"preset": float(preset), "per_token": true, "ratio": preset / true},
        FAILS,
        "the model keeps one latent for all heads",
    )


@_claim("share-at-1m", "At 1M tokens, KV is 70 to 90 per cent of GPU memory")
def _share_at_1m() -> Explained:
    tokens = 1_000_000
    shares, lines = {}, []
    for name, how in (
        ("Llama-3.1-70B", "bf16"),
        ("Llama-3.1-70B", "fp8"),
        ("Llama-3.1-405B", "fp8"),
        ("DeepSeek-V3", "published"),
        ("gpt-oss-120b", "published"),
    ):
        shape = load_model(name)
        weights = shape.parameters * DTYPE_BYTES.get(how, 0.0) or shape.weights_bytes
        kv = shape.context_bytes(tokens)
        shares[f"{name} {how}"] = kv / (kv + weights)
        lines.append(
            f"{name}, {how} weights: {kv / GB:.0f} / ({kv / GB:.0f} + {weights / GB:.0f}) GB = "
            f"{kv / (kv + weights):.0%}"
        )
    return Explained(
        "\n".join(lines),
        shares,
        HOLDS_IF,
        "for one dense 70B with grouped heads and one context; other models are far below",
    )


@_claim("users-320tb", "10,000 users with 32 GB each need 320 TB")
def _users_320tb() -> Explained:
    users, each = 10_000, 32 * GB
    figures = {"tb": users * each / TB}
    lines = [f"10,000 x 32 GB = {figures['tb']:.0f} TB"]
    for name, dtype in (
        ("Llama-3.1-70B", "bf16"),
        ("Llama-3.1-405B", "bf16"),
        ("Qwen3-235B", "bf16"),
        ("DeepSeek-V3", "bf16"),
        ("DeepSeek-V3", "fp8"),
        ("DeepSeek-V4-Flash", "bf16"),
    ):
        per_token = load_model(name).kv_bytes_per_token(dtype)
        key = f"{name} {dtype}"
        figures[f"{key} tokens"] = each / per_token
        figures[f"{key} tb"] = users * 100_000 * per_token / TB
        lines.append(
            f"{key}: 32 GB are {each / per_token:,.0f} tokens; 10,000 x 100,000 tokens are "
            f"{figures[f'{key} tb']:,.0f} TB"
        )
    return Explained(
        "\n".join(lines),
        figures,
        HOLDS_IF,
        "the multiplication is right, but bytes per user differ ninefold or more between models",
    )


@_claim("ttft-20x", "20 times sooner to the first token: 405B, 128K, 8 Hopper GPUs, 2 x 100 Gb/s")
def _ttft_20x() -> Explained:
    shape = load_model("Llama-3.1-405B")
    low, high = (shape.kv_bytes_per_token() * n / GB for n in (TOKENS_128K, TOKENS_128K_BINARY))
    line = 2 * 100e9 / 8 / GB
    flop = shape.prefill_flop(TOKENS_128K_BINARY)
    recompute = 20 * high / line
    utilisation = flop / recompute / (8 * _H100_FLOP_PER_S)
    return Explained(
        f"KV {low:.1f} to {high:.1f} GB / {line:.0f} GB/s = {low / line:.2f} to "
        f"{high / line:.2f} s; 20 times that is {recompute:.0f} s\n"
        f"prefill {flop:.3g} FLOP in {recompute:.0f} s on 8 x 989 TFLOP/s is "
        f"{utilisation:.0%} of the peak",
        {"load_s": high / line, "recompute_s": recompute, "flop": flop, "utilisation": utilisation},
        HOLDS_IF,
        "at line rate, 41 per cent of peak FLOP/s, and a full hit compared with no hit",
    )


@_claim("gpu-time-90", "90 per cent less GPU time")
def _gpu_time_90() -> Explained:
    recompute = _ttft_20x().figures["recompute_s"]
    share = (0.1 - 1 / 20) / 0.9  # (T/20 + D) / (T + D) = 0.1 solved for D / T
    return Explained(
        f"(T / 20 + D) / (T + D) = 0.1 gives a decode of D = {share:.3f} T\n"
        f"with T = {recompute:.0f} s that is {share * recompute:.1f} s of decode",
        {"decode_share": share, "decode_s": share * recompute},
        HOLDS_IF,
        "with about 3 s of decode, and if GPU time spent waiting for a load is not charged",
    )


@_claim("tokens-per-dollar", "60 to 130 per cent more tokens per dollar at 40 to 60 per cent hits")
def _tokens_per_dollar() -> Explained:
    cases = {"": (1, 20, 0), "half_": (0.5, 20, 0.1), "most_": (0.8, 20, 0), "tenfold_": (1, 10, 0)}
    figures: dict[str, float] = {}
    shown = {}
    for case, assumed in cases.items():
        low, high = (tokens_per_dollar_gain(hit, *assumed) for hit in (0.4, 0.6))
        figures |= {f"{case}low": low, f"{case}high": high}
        shown[case] = f"{low:.0%} and {high:.0%}"
    return Explained(
        "gain = 1 / (1 - hit x prefill share x (1 - 1/speed-up)) / (1 + storage cost) - 1\n"
        f"hit .4 and .6, all GPU time is prefill, 20x, storage free: {shown['']}\n"
        f"as before, but a hit is 10x: {shown['tenfold_']}\n"
        f"prefill is .5 of GPU time, storage costs .1 of the GPUs: {shown['half_']}\n"
        f"prefill is .8 of GPU time, storage free: {shown['most_']}",
        figures,
        HOLDS_IF,
        "only if the hit rate is a share of GPU time, prefill is all of it and storage is free",
    )


@_claim("fetch-rule", "A prefix is worth fetching above 6 GB/s (8 A800), 19 (8 H800)")
def _fetch_rule() -> Explained:
    hidden, grouping, prefix = 8192, 8, 8192
    older, newer = (
        fetch_rule_bytes_per_s(hidden, grouping, prefix, 8 * flop) / GB
        for flop in (_A100_FLOP_PER_S, _H100_FLOP_PER_S)
    )
    return Explained(
        "B / G > 2 d s / (gqa (a p d + b d^2)), a = 4, b = 22, d = 8,192, s = 2, gqa = 8, "
        "p = 8,192\n"
        f"8 x 312 TFLOP/s: {older:.1f} GB/s; 8 x 989 TFLOP/s: {newer:.1f} GB/s",
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


@_claim("break-even", "Fetching context is always faster than computing it again")
def _break_even() -> Explained:
    lengths = (2048, 8192, 32_768, TOKENS_128K_BINARY)
    flop_per_s = 8 * _H100_FLOP_PER_S * 0.5
    figures: dict[str, float] = {}
    lines = ["KV bytes / prefill time on 8 H100 at half their peak, in GB/s at 2K, 8K, 32K, 128K:"]
    for name in _BREAK_EVEN_MODELS:
        shape = load_model(name)
        # Windows and recurrent states do not grow with the context, so they are left out.
        row = [
            tokens * shape.kv_bytes_per_token() / (shape.prefill_flop(tokens) / flop_per_s) / GB
            for tokens in lengths
        ]
        figures |= {f"{name} {n}": value for n, value in zip(lengths, row, strict=True)}
        lines.append(f"{name:<16}" + "".join(f"{value:7.1f}" for value in row))
    return Explained(
        "\n".join(lines),
        figures,
        HOLDS_IF,
        "small sparse models with grouped heads need DRAM, models with latent attention only a "
        "disk; a busy GPU lowers the break-even, a busy link raises it",
    )


@_claim("latency-1000x", "From DRAM or CXL to NVMe is a step of 1,000x in latency")
def _latency_1000x() -> Explained:
    dram, flash = 100e-9, 100e-6
    low, high = 10e-6 / 600e-9, 100e-6 / 250e-9
    return Explained(
        f"DRAM 100 ns to a flash read of 100 us: {flash / dram:,.0f}x\n"
        f"CXL 250 to 600 ns to flash 10 to 100 us: {low:.0f}x to {high:.0f}x",
        {"dram": flash / dram, "cxl_low": low, "cxl_high": high},
        HOLDS_IF,
        "for DRAM against a slow flash read; but a fetch of context is limited by bandwidth",
    )


@_claim("latency-slo", "A fetch of about 100 us breaks the time to first token")
def _latency_slo() -> Explained:
    nbytes = 4000 * load_model("Llama-3.1-70B").kv_bytes_per_token()
    transfer_s, latency_s = nbytes / 14e9, 100e-6
    share = latency_s / (transfer_s + latency_s)
    return Explained(
        f"4,000 tokens of a 70B are {nbytes / GB:.2f} GB: {1e3 * transfer_s:.0f} ms at 14 GB/s\n"
        f"100 us of {1e3 * (transfer_s + latency_s):.0f} ms is {share:.1%}",
        {"gb": nbytes / GB, "transfer_ms": 1e3 * transfer_s, "share": share},
        FAILS,
        "bandwidth dominates a fetch; latency is a thousandth of it",
    )


@_claim("hbm", "HBM gives 5 to 8 TB/s (HBM3E), about 2 TB/s per stack (HBM4)")
def _hbm() -> Explained:
    stacks = 4.8 / 6
    return Explained(
        f"H200: 4.8 TB/s on six stacks = {stacks:.1f} TB/s per stack; B200 about 8 TB/s on "
        f"eight = {8 / 8:.1f}\n"
        "HBM3E itself goes to about 1.2 TB/s per stack, HBM4 to about 2",
        {"h200_per_stack": stacks, "b200_per_stack": 8 / 8},
        HOLDS_IF,
        "the first figure is per GPU, the second per stack",
    )


@_claim("ddr5", "DDR5 gives 40 to 50 GB/s per channel")
def _ddr5() -> Explained:
    low, high = 5600e6 * 8 / GB, 6400e6 * 8 / GB
    return Explained(
        f"8 bytes x 5,600 MT/s = {low:.1f} GB/s; x 6,400 = {high:.1f} GB/s",
        {"low": low, "high": high},
        HOLDS,
        "at the peak of the channel",
    )


@_claim("wear", "Endurance, not capacity, sizes the flash tiers")
def _wear() -> Explained:
    rate, drive = 10_000, 30.72 * TB
    dense = rate * load_model("Llama-3.1-70B").kv_bytes_per_token()
    latent = rate * load_model("DeepSeek-V3").kv_bytes_per_token()
    drives = [nbytes * SECONDS_PER_DAY / drive for nbytes in (dense, latent)]  # 1 write a day
    return Explained(
        f"10,000 new tokens/s x 327,680 bytes = {dense / GB:.1f} GB/s = "
        f"{dense * SECONDS_PER_DAY / TB:.0f} TB a day\n"
        f"/ 30.72 TB a day and drive = {drives[0]:.1f} drives; with latent attention "
        f"{drives[1]:.1f}",
        {
            "gb_per_s": dense / GB,
            "tb_per_day": dense * SECONDS_PER_DAY / TB,
            "drives": drives[0],
            "latent_drives": drives[1],
        },
        HOLDS_IF,
        "for dense models that write every token; admission and latent attention reduce the writes",
    )


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
