"""Claims about the size of KV state: per token, request and user, and in GPU memory."""

from __future__ import annotations

from holdfast.sim.explain.claim import (
    FAILS,
    HOLDS,
    HOLDS_IF,
    TOKENS_128K,
    TOKENS_128K_BINARY,
    CirculatingClaim,
    Explained,
)
from holdfast.sim.formulas import GB, TB
from holdfast.sim.model import load_model


def _context_70b() -> Explained:
    shape = load_model("Llama-3.1-70B")
    per_token = shape.kv_bytes_per_token()
    low, high = per_token * TOKENS_128K / GB, per_token * TOKENS_128K_BINARY / GB
    return Explained(
        (
            f"2 x 80 layers x 8 KV heads x 128 x 2 bytes = {per_token:,.0f} bytes a token",
            f"x 128,000 tokens = {low:.1f} GB; x 131,072 = {high:.1f} GB",
        ),
        {"per_token": per_token, "gb": low, "gb_binary": high},
        HOLDS,
        "in bf16, with 128K = 128,000; the model is Llama 3.1, since Llama 3 ends at 8K",
    )


def _half_h100() -> Explained:
    per_token = load_model("Llama-3.1-70B").kv_bytes_per_token()
    low, high = per_token * TOKENS_128K / (80 * GB), per_token * TOKENS_128K_BINARY / (80 * GB)
    return Explained(
        (f"41.9 / 80 = {low:.1%}; 42.9 / 80 = {high:.1%}",),
        {"share": low, "share_binary": high},
        HOLDS,
        "of the nominal memory; weights and activations also need part of it",
    )


def _token_405b() -> Explained:
    per_token = load_model("Llama-3.1-405B").kv_bytes_per_token()
    return Explained(
        (f"2 x 126 layers x 8 KV heads x 128 x 2 bytes = {per_token:,.0f} bytes",),
        {"per_token": per_token},
        HOLDS,
        "exactly, in bf16 and decimal KB",
    )


def _token_qwen72b() -> Explained:
    per_token = 2 * 80 * 8 * 128 * 2
    return Explained(
        (f"2 x 80 layers x 8 KV heads x 128 x 2 bytes = {per_token:,} bytes",),
        {"per_token": per_token},
        HOLDS_IF,
        "exactly, with 80 layers and 8 KV heads of 128; its config is not shipped",
    )


def _mla_17x() -> Explained:
    dense, latent = load_model("Llama-3.1-405B"), load_model("DeepSeek-V3")
    fp8 = latent.kv_bytes_per_token("fp8")
    tokens = 8 * GB / fp8
    at = 262_144
    plain = 2 * 61 * 128 * (192 + 128) / 2 * 2  # keys of 192, values of 128, 128 heads, bf16
    ratio = plain / latent.kv_bytes_per_token()
    bf16 = latent.kv_bytes_per_token() * TOKENS_128K / GB
    return Explained(
        (
            (
                f"latent attention in fp8: 61 x 576 x 1 = {fp8:,.0f} bytes, so 8 GB is "
                f"{tokens:,.0f} tokens; in bf16 128K tokens are {bf16:.1f} GB"
            ),
            (
                f"135 GB is Llama-3.1-405B at {at:,} tokens: "
                f"{dense.kv_bytes_per_token() * at / GB:.1f} GB; there the latent takes "
                f"{fp8 * at / GB:.1f} GB"
            ),
            (
                f"DeepSeek-V3 with 128 heads of its own would take {plain / 1e6:.1f} MB a token "
                f"({plain * TOKENS_128K_BINARY / GB:,.0f} GB at 131,072): {ratio:.0f} latents"
            ),
        ),
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


def _compression() -> Explained:
    grouped = 64 / 8
    latent = _mla_17x().figures["against_itself"]
    return Explained(
        (
            (
                f"grouped heads of a 70B: 64 / 8 = {grouped:.0f}x; latent against its own full "
                f"heads {latent:.0f}x"
            ),
            "fp8 against bf16 2x, fp4 4x",
        ),
        {"grouped": grouped, "latent": latent},
        HOLDS_IF,
        "as an order of magnitude: the ratio depends on the two layouts compared",
    )


def _share_at_1m() -> Explained:
    tokens = 1_000_000
    shares, lines = {}, []
    for name, weights_dtype_bytes in (
        ("Llama-3.1-70B", 2.0),
        ("Llama-3.1-70B", 1.0),
        ("Llama-3.1-405B", 1.0),
        ("DeepSeek-V3", 0.0),
        ("gpt-oss-120b", 0.0),
    ):
        shape = load_model(name)
        weights = shape.parameters * weights_dtype_bytes or shape.weights_bytes
        kv = shape.context_bytes(tokens)
        how = {2.0: "bf16", 1.0: "fp8", 0.0: "published"}[weights_dtype_bytes]
        shares[f"{name} {how}"] = kv / (kv + weights)
        lines.append(
            f"{name}, {how} weights: {kv / GB:.0f} / ({kv / GB:.0f} + {weights / GB:.0f}) GB = "
            f"{kv / (kv + weights):.0%}"
        )
    return Explained(
        tuple(lines),
        shares,
        HOLDS_IF,
        "for one dense 70B with grouped heads and one context; other models are far below",
    )


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
        tuple(lines),
        figures,
        HOLDS_IF,
        "the multiplication is right, but bytes per user differ ninefold or more between models",
    )


def _mla_preset() -> Explained:
    shape = load_model("DeepSeek-V3")
    hidden = 7168
    preset, true = 2 * 61 * hidden * 2, shape.kv_bytes_per_token()
    return Explained(
        (
            f"2 x 61 layers x {hidden} x 2 bytes = {preset:,} bytes, if every head were kept",
            f"61 layers x (512 + 64) x 2 bytes = {true:,.0f} bytes: {preset / true:.0f} times less",
        ),
        {"preset": float(preset), "per_token": true, "ratio": preset / true},
        FAILS,
        "the model keeps one latent for all heads",
    )


CLAIMS = (
    CirculatingClaim(
        "context-70b", "One request of Llama-3-70B at 128K tokens is about 42 GB", _context_70b
    ),
    CirculatingClaim("half-h100", "That is over half of an 80 GB H100", _half_h100),
    CirculatingClaim("token-405b", "Llama-3.1-405B takes 516 KB a token", _token_405b),
    CirculatingClaim("token-qwen72b", "Qwen2.5-72B takes 327 KB a token", _token_qwen72b),
    CirculatingClaim(
        "mla-17x", "Latent attention with fp8 takes 135 GB down to 8 GB, about 17x", _mla_17x
    ),
    CirculatingClaim(
        "compression", "Grouped or latent attention with fp8 or fp4 saves 4x to 40x", _compression
    ),
    CirculatingClaim(
        "mla-preset", "DeepSeek-V3 takes 1,749,384 bytes a token (a benchmark preset)", _mla_preset
    ),
    CirculatingClaim(
        "share-at-1m", "At 1M tokens, KV is 70 to 90 per cent of GPU memory", _share_at_1m
    ),
    CirculatingClaim("users-320tb", "10,000 users with 32 GB each need 320 TB", _users_320tb),
)
