"""Lossy codecs of domains: permitted by gate records, applied before a block is published.

A domain asks for a codec in its configuration. A gate record permits it for one fingerprint;
without one, blocks stay exact. The codec is part of the fingerprint, so a quantised block never
meets an exact one, and it changes a block's values once, in its slot, before any reader can find
it. After that the codec loses nothing, so every tier gives the same values.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import Layout, PortableLayout, QuantisedLayout
from holdfast.blocks.namespace import Namespace
from holdfast.codec import int8
from holdfast.codec.gate import RECORD_BYTES_MAX, gate_file, read_gate_record, why_refused
from holdfast.codec.int8 import Int8
from holdfast.errors import FormatError
from holdfast.regular_file import read_regular
from holdfast.status import QuantiseStatus

SAVING = 0.95
"""Largest share of a block's bytes that its coded form may take."""


class QuantiseChoice(NamedTuple):
    """The fingerprint of a session's blocks: quantised, or as the session named it.

    `why`: why they stay exact although the domain asks for a codec; or, for a session that named
    quantised blocks, why it cannot have them. Empty if neither is so.
    """

    fingerprint: Fingerprint
    why: str = ""


class Quantise:
    """Chooses the codec of sessions, applies it to their blocks, and counts. Thread-safe.

    `domains`: the secret of each domain that asks for `int8`, by name. `gates`: the folder of gate
    records; None if there is none.
    """

    def __init__(self, domains: Mapping[str, bytes], gates: Path | None) -> None:
        self._domains = domains
        self._gates = gates
        self._codecs: dict[Namespace, Int8] = {}
        """By namespace of a session. Each needed a gate record, so there are few."""
        self._lock = threading.Lock()
        self._quantised = self._left_exact = self._raw_bytes = self._refusals = 0

    def choose(self, domain: str, fingerprint: Fingerprint) -> QuantiseChoice:
        """Return the fingerprint that a session's blocks have in this domain; reads its record."""
        layout, secret = fingerprint.representation, self._domains.get(domain)
        named = isinstance(layout, QuantisedLayout)
        if secret is None:
            why = f"domain {domain!r} stores exact blocks only: set domains.{domain}.quantise: int8"
            return QuantiseChoice(fingerprint, why if named else "")
        if isinstance(layout, QuantisedLayout):
            if (layout.codec, layout.codec_version) != (int8.NAME, int8.VERSION):
                why = f"this node has {int8.NAME} version {int8.VERSION}, not {layout.codec} "
                return QuantiseChoice(fingerprint, f"{why}version {layout.codec_version}")
            quantised, layout = fingerprint, layout.exact
        elif (why := _why_not(layout)) or not isinstance(layout, PortableLayout):
            return self._refuse(fingerprint, f"domains.{domain}.quantise: {why}")
        else:
            quantised = fingerprint.quantised(int8.NAME, int8.VERSION)
        if why := self._why_not_permitted(secret, quantised):
            digest = quantised.digest().hex()
            return self._refuse(
                fingerprint,
                f"domains.{domain}.quantise: no gate record permits int8 for fingerprint {digest}: "
                f"{why}; blocks stay exact. Run: holdfast judge int8 --model FOLDER --prompts FILE "
                f"--fingerprint {digest} --domain {domain} --dtype {layout.dtype} "
                f"--block-tokens {layout.block_tokens}",
            )
        return QuantiseChoice(quantised)

    def enter(self, namespace: Namespace, fingerprint: Fingerprint) -> None:
        """Apply the codec that a permitted fingerprint names to the namespace's new blocks."""
        layout = fingerprint.representation
        if isinstance(layout, QuantisedLayout):
            self._codecs[namespace] = Int8(layout.exact)

    def codec_of(self, namespace: Namespace) -> Int8 | None:
        """Return the codec of a namespace's blocks; None if no session named them quantised."""
        return self._codecs.get(namespace)

    def apply(self, namespace: Namespace, payload: memoryview) -> None:
        """Replace a new block's values by those that the codec keeps, if its namespace has one.

        A block that the codec cannot take stays exact.
        """
        codec = self._codecs.get(namespace)
        if codec is None:
            return
        quantised = codec.quantised(payload)
        with self._lock:
            if quantised:
                self._quantised += 1
                self._raw_bytes += len(payload)
            else:
                self._left_exact += 1

    def status(self) -> QuantiseStatus:
        """Return what was quantised and refused since the start."""
        with self._lock:
            return QuantiseStatus(
                domains=sorted(self._domains),
                quantised=self._quantised,
                raw_bytes=self._raw_bytes,
                left_exact=self._left_exact,
                refusals=self._refusals,
            )

    def _refuse(self, fingerprint: Fingerprint, why: str) -> QuantiseChoice:
        with self._lock:
            self._refusals += 1
        return QuantiseChoice(fingerprint, why)

    def _why_not_permitted(self, secret: bytes, quantised: Fingerprint) -> str:
        if self._gates is None:
            return "there is no folder of gate records; set gates, or a disk tier"
        file = gate_file(self._gates, quantised.digest().hex())
        try:
            record = read_gate_record(read_regular(file, RECORD_BYTES_MAX))
        except FileNotFoundError:
            return f"{str(file)!r} does not exist"
        except OSError as error:
            return f"{str(file)!r} cannot be read: {error.strerror}"
        except FormatError as error:
            return f"{str(file)!r}: {error}"
        why = why_refused(record, secret, quantised)
        return f"{str(file)!r}: {why}" if why else ""


def _why_not(layout: Layout) -> str:
    """Return why blocks of a layout stay exact; empty if they can be quantised."""
    if why := int8.why_not(layout):
        return f"{why}; blocks stay exact"
    if isinstance(layout, PortableLayout):
        share = int8.coded_bytes(layout) / layout.raw_bytes
        if share > SAVING:
            return (
                f"a coded block takes {share:.2f} of its bytes, more than {SAVING}; blocks stay "
                "exact; raise block_tokens"
            )
    return ""
