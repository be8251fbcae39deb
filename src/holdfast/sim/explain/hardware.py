"""Claims about media: latency, bandwidth, wear."""

from __future__ import annotations

from holdfast.sim.explain.claim import FAILS, HOLDS, HOLDS_IF, CirculatingClaim, Explained
from holdfast.sim.formulas import GB, SECONDS_PER_DAY, TB, drives_for_writes
from holdfast.sim.model import load_model


def _latency_1000x() -> Explained:
    dram, flash = 100e-9, 100e-6
    low, high = 10e-6 / 600e-9, 100e-6 / 250e-9
    return Explained(
        (
            f"DRAM 100 ns to a flash read of 100 us: {flash / dram:,.0f}x",
            f"CXL 250 to 600 ns to flash 10 to 100 us: {low:.0f}x to {high:.0f}x",
        ),
        {"dram": flash / dram, "cxl_low": low, "cxl_high": high},
        HOLDS_IF,
        "for DRAM against a slow flash read; but a fetch of context is limited by bandwidth",
    )


def _latency_slo() -> Explained:
    nbytes = 4000 * load_model("Llama-3.1-70B").kv_bytes_per_token()
    transfer_s, latency_s = nbytes / 14e9, 100e-6
    share = latency_s / (transfer_s + latency_s)
    return Explained(
        (
            f"4,000 tokens of a 70B are {nbytes / GB:.2f} GB: {1e3 * transfer_s:.0f} ms at 14 GB/s",
            f"100 us of {1e3 * (transfer_s + latency_s):.0f} ms is {share:.1%}",
        ),
        {"gb": nbytes / GB, "transfer_ms": 1e3 * transfer_s, "share": share},
        FAILS,
        "bandwidth dominates a fetch; latency is a thousandth of it",
    )


def _hbm() -> Explained:
    stacks = 4.8 / 6
    return Explained(
        (
            (
                f"H200: 4.8 TB/s on six stacks = {stacks:.1f} TB/s per stack; B200 about 8 TB/s on "
                f"eight = {8 / 8:.1f}"
            ),
            "HBM3E itself goes to about 1.2 TB/s per stack, HBM4 to about 2",
        ),
        {"h200_per_stack": stacks, "b200_per_stack": 8 / 8},
        HOLDS_IF,
        "the first figure is per GPU, the second per stack",
    )


def _ddr5() -> Explained:
    low, high = 5600e6 * 8 / GB, 6400e6 * 8 / GB
    return Explained(
        (f"8 bytes x 5,600 MT/s = {low:.1f} GB/s; x 6,400 = {high:.1f} GB/s",),
        {"low": low, "high": high},
        HOLDS,
        "at the peak of the channel",
    )


def _wear() -> Explained:
    rate, drive = 10_000, 30.72 * TB
    dense = rate * load_model("Llama-3.1-70B").kv_bytes_per_token()
    latent = rate * load_model("DeepSeek-V3").kv_bytes_per_token()
    drives = [drives_for_writes(nbytes, drive, 1.0) for nbytes in (dense, latent)]
    return Explained(
        (
            (
                f"10,000 new tokens/s x 327,680 bytes = {dense / GB:.1f} GB/s = "
                f"{dense * SECONDS_PER_DAY / TB:.0f} TB a day"
            ),
            (
                f"/ 30.72 TB a day and drive = {drives[0]:.1f} drives; with latent attention "
                f"{drives[1]:.1f}"
            ),
        ),
        {
            "gb_per_s": dense / GB,
            "tb_per_day": dense * SECONDS_PER_DAY / TB,
            "drives": drives[0],
            "latent_drives": drives[1],
        },
        HOLDS_IF,
        "for dense models that write every token; admission and latent attention reduce the writes",
    )


CLAIMS = (
    CirculatingClaim(
        "latency-1000x", "From DRAM or CXL to NVMe is a step of 1,000x in latency", _latency_1000x
    ),
    CirculatingClaim(
        "latency-slo", "A fetch of about 100 us breaks the time to first token", _latency_slo
    ),
    CirculatingClaim("hbm", "HBM gives 5 to 8 TB/s (HBM3E), about 2 TB/s per stack (HBM4)", _hbm),
    CirculatingClaim("ddr5", "DDR5 gives 40 to 50 GB/s per channel", _ddr5),
    CirculatingClaim("wear", "Endurance, not capacity, sizes the flash tiers", _wear),
)
