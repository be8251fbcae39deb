"""Gate records: the signed result of judging a lossy codec, which permits it for one fingerprint.

`holdfast judge` measures how much the text that follows a context changes if its blocks are coded.
The unit is the *control*: how much it changes if the same model computes it with other arithmetic.
A record names the fingerprint, and carries a code that only the domain's secret makes, so a forged
record, or one of another model or domain, permits nothing. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import msgspec

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import PortableLayout, QuantisedLayout
from holdfast.errors import FormatError
from holdfast.prepared import prepared

GATE_FORMAT = 1

PROMPTS_MIN = 64
CODED_TOKENS_MIN = 512
JUDGED_TOKENS_MIN = 128
"""Smallest measurement that permits a codec: tokens are counted per prompt."""

CONTROLS_MAX = 2.0
"""Largest divergence that passes, as a multiple of the control's; for mean and 99th percentile."""

TOP_TOKEN_LOSS_MAX = 0.005
"""Largest share of positions that may lose the top token, beyond the control's."""

RECORD_BYTES_MAX = 1 << 16
"""Largest file that is read as a gate record."""

_PERSON = b"holdfast-gate"
_SHOWN = 64


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the next-token distributions of two runs differ over all judged positions.

    `kl`: mean Kullback-Leibler divergence in nats; `kl_p99`: its 99th percentile; `same_top`: share
    of positions with the same most likely token; `nats_lost`: mean loss on the text, minus that of
    the first run. `score`: share of the text's tokens that the second run predicts, as its most
    likely token; `score_error`: its standard error, over prompts.
    """

    kl: float
    kl_p99: float
    same_top: float
    nats_lost: float
    score: float
    score_error: float


@prepared
class GateRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was judged, how, and with what result.

    `fingerprint`: hex, of the coded blocks. `model`: the judged model, as in their fingerprint's
    meaning; empty if no fingerprint is named. `control`: the arithmetic that the control used.
    `exact_blocks`: share of the blocks that the codec left exact. `made`: UTC, ISO 8601. `mac`:
    hex, see `signed`.
    """

    fingerprint: str
    codec: str
    version: int
    layout: PortableLayout
    model: str
    engine: str
    control: str
    prompts: int
    coded_tokens: int
    judged_tokens: int
    exact_blocks: float
    control_difference: Difference
    coded_difference: Difference
    made: str
    mac: str = ""
    format: int = GATE_FORMAT


_decoder = msgspec.json.Decoder(GateRecord)


def gate_file(folder: Path, fingerprint: str) -> Path:
    """Return the path of the record for a fingerprint in hex."""
    return folder / f"{fingerprint}.json"


def objections(record: GateRecord) -> list[str]:
    """Return why a record does not pass the gate; empty if it does."""
    found = [
        f"{name} is {value}, fewer than {least}"
        for name, value, least in (
            ("prompts", record.prompts, PROMPTS_MIN),
            ("coded tokens", record.coded_tokens, CODED_TOKENS_MIN),
            ("judged tokens", record.judged_tokens, JUDGED_TOKENS_MIN),
        )
        if value < least
    ]
    return found + excesses(record.coded_difference, record.control_difference)


def excesses(coded: Difference, control: Difference) -> list[str]:
    """Return the figures of the coded run that are beyond the control's by too much.

    Figures that are not numbers are. The control's second run is the exact one, so its score is
    that of the exact blocks.
    """
    found = [
        f"{name} is {value:.3g}, more than {CONTROLS_MAX:g} times the control's {unit:.3g}"
        for name, value, unit in (
            ("KL", coded.kl, control.kl),
            ("KL p99", coded.kl_p99, control.kl_p99),
        )
        if not value <= CONTROLS_MAX * unit
    ]
    least = control.same_top - TOP_TOKEN_LOSS_MAX
    if not coded.same_top >= least:
        found.append(
            f"the top token is the same at {coded.same_top:.2%} of positions, less than "
            f"{least:.2%}, the control's less {TOP_TOKEN_LOSS_MAX:.1%}"
        )
    if not coded.score >= control.score - control.score_error:
        found.append(
            f"{coded.score:.2%} of the text's tokens are predicted, and {control.score:.2%} from "
            f"exact blocks, with a standard error of {control.score_error:.2%}"
        )
    return found


def signed(record: GateRecord, domain_key: bytes) -> GateRecord:
    """Return the record with its code: BLAKE2b of its other fields, keyed by the domain's secret.

    Their text is the fields as JSON with sorted keys and an empty `mac`.
    """
    plain = msgspec.structs.replace(record, mac="")
    text = msgspec.json.encode(plain, order="sorted")
    code = hashlib.blake2b(text, key=domain_key, digest_size=32, person=_PERSON).hexdigest()
    return msgspec.structs.replace(plain, mac=code)


def read_gate_record(data: bytes) -> GateRecord:
    """Decode the file of a record. Raises FormatError."""
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"not a gate record: {error}") from error
    if record.format != GATE_FORMAT:
        raise FormatError(f"gate record of format {record.format}; this build reads {GATE_FORMAT}")
    return record


def write_gate_record(record: GateRecord) -> bytes:
    """Return the file of a record."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def why_refused(record: GateRecord, domain_key: bytes, fingerprint: Fingerprint) -> str:
    """Return why a record does not permit a fingerprint of coded blocks; empty if it does."""
    if not hmac.compare_digest(signed(record, domain_key).mac.encode(), record.mac.encode()):
        return "it was not made with this domain's secret, or was changed"
    blocks = fingerprint.representation
    if not isinstance(blocks, QuantisedLayout) or record.fingerprint != fingerprint.digest().hex():
        return f"it is of fingerprint {record.fingerprint[:32]}"
    if (record.codec, record.version) != (blocks.codec, blocks.codec_version):
        return (
            f"it is of codec {record.codec} version {record.version}, not {blocks.codec} "
            f"{blocks.codec_version}"
        )
    if record.layout != blocks.exact:
        return f"it is of blocks of another layout, {record.layout}"
    if record.model != fingerprint.meaning.model:
        return (
            f"the judged model is {record.model[:_SHOWN]!r}, and the blocks are of "
            f"{fingerprint.meaning.model[:_SHOWN]!r}: judge the folder that the engine serves"
        )
    return "; ".join(objections(record))
