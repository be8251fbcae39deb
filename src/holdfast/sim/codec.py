"""What a codec does to a modelled tier: fewer stored bytes, and reads bounded by the decoders.

A tier with the ratio r stores 1/r of the raw bytes. A reader gets r times the tier's bandwidth, and
at most what its decoding threads deliver. The rule of a node (`holdfast.plan.codec_choice`) decides
whether a tier encodes.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.codec.codec import CodecMode
from holdfast.plan.codec_choice import CodecRates, worth_encoding
from holdfast.sim.profile import Profile

ENCODED_DTYPES = ("bf16",)
"""Types of KV state that shrink by the profile's ratio; others shrink less, and count raw."""

ENCODED_KINDS = ("disk", "pool", "files", "object")
"""Kinds of tiers that keep encoded records; memory keeps raw ones."""


class TierEncoding(NamedTuple):
    """Raw bytes per stored byte of a tier, and the raw bytes a second that a reader decodes."""

    ratio: float = 1.0
    decode_bytes_per_s: float = float("inf")

    def delivered(self, stored_bytes_per_s: float) -> float:
        """Return the raw bytes a second that one reader gets from a bandwidth of stored bytes."""
        return min(stored_bytes_per_s * self.ratio, self.decode_bytes_per_s)


RAW = TierEncoding()


def tier_encoding(
    profile: Profile, kind: str, dtype: str, bytes_per_s: float, mode: CodecMode = "auto"
) -> TierEncoding:
    """Return how a tier stores KV state of a type; `bytes_per_s`: what one reader gets of it.

    `dtype` is empty if the type is not known; only the mode `planes` encodes then.
    """
    figures = profile.codec
    threads = int(figures.decode_threads.mid)
    rates = CodecRates(bytes_per_s, figures.decode_bytes_per_s.mid, threads)
    shrinks = dtype in ENCODED_DTYPES or (mode == "planes" and not dtype)
    if mode == "off" or kind not in ENCODED_KINDS or not shrinks:
        return RAW
    if mode == "auto" and not worth_encoding(rates, encodes=False):
        return RAW
    return TierEncoding(figures.ratio.mid, rates.decoding)
