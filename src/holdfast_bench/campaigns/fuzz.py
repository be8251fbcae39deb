"""Fuzz campaign: parsers accept or refuse mutated frames, messages, records, regions, settings.

Every parser of external data gets mutated valid inputs. It may return or raise its documented
error. Any other exception is a failure, and so is more than `CPU_S_MAX` for one input or memory
growth beyond `GROWTH_BYTES_MAX`. If a checksum covers the input, half of the inputs get the right
checksum, so that the parser behind it is reached. The seeds are made here; `tests/corpus` holds
inputs that once caused failures, or similar ones.
"""

from __future__ import annotations

import contextlib
import random
import resource
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.blocks.envelope import read_header
from holdfast.codec.pack import verify
from holdfast.config import load
from holdfast.errors import ConfigError, FormatError, HoldfastError, MembershipError, ProtocolError
from holdfast.limits import KIB, MIB
from holdfast.membership.file_source import FileSource
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.tiers.disk import region
from holdfast.wire.frame import (
    HEADER_BYTES,
    FrameReader,
    encode,
    read_head,
    reply_reader,
    request_reader,
)
from holdfast.wire.local import messages as m
from holdfast.wire.remote import messages as t
from holdfast.wire.remote import token
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.workload import GEOMETRY, live

CPU_S_MAX = 1.0
GROWTH_BYTES_MAX = 256 * MIB
INPUT_BYTES_MAX = 64 * KIB
SHOWN_BYTES = 96
CHANGES_MAX = 8
CHECKSUM_CHANCE = 0.5
PROVEN_AT = 2_000
"""Of so many inputs at least one must be accepted."""

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 62)
_NAMESPACE = namespace_of(3_000)
_KEYS = b"".join(key_of(number) for number in range(5))
_NAMES = {**_NAMESPACE._asdict(), "keys": _KEYS}


class FuzzSubject(NamedTuple):
    """One parser: valid inputs, the function that parses, and the errors it may raise.

    `parse` returns False if an input is too short for a verdict. `fix_checksum`, if given, returns
    the input with the right checksum.
    """

    seeds: Sequence[bytes]
    parse: Callable[[bytes], bool]
    refusals: tuple[type[Exception], ...]
    fix_checksum: Callable[[bytes], bytes] | None = None


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Fuzz every parser with its share of the tries."""
    subjects = every_subject(budget.folder)
    for name, subject in subjects.items():
        yield _feed(f"fuzz.{name}", subject, budget.share(len(subjects)))


def every_subject(folder: Path) -> dict[str, FuzzSubject]:
    """Return the parsers by name; `folder` is for the files that some of them read."""
    record = bytes(record_of(_NAMESPACE, key_of(0)))
    image = bytes(live(1).medium.image)
    sectors = [image[at : at + region.SECTOR] for at in range(0, len(image), region.SECTOR)]
    wire = (ProtocolError,)
    members, config = folder / "fuzzed-members.yaml", folder / "fuzzed.yaml"
    issued = token.issue(bytes(32), "n", ("read",), 60, 0).encode()
    return {
        "requests": FuzzSubject(_REQUESTS, partial(_read, request_reader), wire),
        "replies": FuzzSubject(_REPLIES, partial(_read, reply_reader), wire),
        "target.requests": FuzzSubject(_TO_TARGET, partial(_decode, _TARGET_REQUEST), wire),
        "target.replies": FuzzSubject(_FROM_TARGET, partial(_decode, _TARGET_REPLY), wire),
        "envelope": FuzzSubject([record, record[:128]], _read_record, (FormatError,)),
        "region": FuzzSubject(
            [each for each in sectors if _crc_of(each)], _read_region, (FormatError,), _with_crc
        ),
        "token": FuzzSubject([issued], _read_token, (HoldfastError,)),
        "members": FuzzSubject([_MEMBERS], partial(_read_members, members), (MembershipError,)),
        "config": FuzzSubject(_CONFIGS, partial(_load, config), (ConfigError,)),
    }


def _feed(what: str, subject: FuzzSubject, budget: CampaignBudget) -> CampaignResult:
    """Parse mutated inputs; check the outcome, the CPU time and the memory."""
    _restart_peak()
    result, before = CampaignResult(what, "inputs"), _peak_bytes()
    for rng in budget.rounds(result):
        data = mutated(subject.seeds, rng)
        if subject.fix_checksum and rng.random() < CHECKSUM_CHANCE:
            data = subject.fix_checksum(data)
        start = time.thread_time()
        try:
            result.counts["understood" if subject.parse(data) else "too short"] += 1
        except subject.refusals:
            result.counts["refused"] += 1
        except Exception as error:  # noqa: BLE001  # any other error is a finding
            result.fail(f"{error!r:.200} for {data[:SHOWN_BYTES].hex()} of {len(data)} bytes")
        spent = time.thread_time() - start
        result.expect(spent < CPU_S_MAX, f"{spent:.2f} s for {data[:SHOWN_BYTES].hex()}")
        result.tried += 1
    growth = _peak_bytes() - before
    result.figures["growth_mib"] = growth / MIB
    result.expect(growth < GROWTH_BYTES_MAX, f"memory grew by {growth / MIB:.0f} MiB")
    refused, understood = result.counts["refused"], result.counts["understood"]
    budget.expect_enough(result, refused, "no input was refused: the mutations are too small")
    if result.tried >= PROVEN_AT:
        result.expect(understood, "no input was accepted: the mutations are too large")
    return result


def mutated(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a seed with up to `CHANGES_MAX` random changes; one may splice in another seed."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, CHANGES_MAX)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 2:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                number = struct.pack("<Q", rng.choice(_INTERESTING))[: rng.choice((1, 2, 4, 8))]
                data[at : at + len(number)] = number
            case 4:
                del data[at : at + rng.choice((1, 2, 16, 256))]
            case 5:
                piece = data[at : at + rng.choice((1, 8, 64))]
                data[at:at] = piece * rng.choice((1, 2, 50))
            case 6:
                other = rng.choice(seeds)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                data[at:at] = rng.choice(_NESTS) * rng.choice((1, 10, 1_000))
    return bytes(data[:INPUT_BYTES_MAX])


_NESTS = (b"[", b"{a: ", b"- ", b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"&a [*a, ", b"\0")
"""Openings of nested values in YAML and MessagePack."""


def _restart_peak() -> None:
    """Make the kernel count the peak of this process's memory from now on, where it can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    return KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _encoded(*messages: msgspec.Struct, payload_bytes: int = 0) -> list[bytes]:
    return [bytes(encode(number, each, payload_bytes)) for number, each in enumerate(messages)]


_REQUESTS = _encoded(
    m.Hello(m.PROTOCOL, "engine", b"f" * 16, 4096, 128, "default", "a model"),
    m.Cover(_KEYS),
    m.Fetch(_KEYS, 1.0),
    m.Reserve(_KEYS, b"p" * 16, 3, b"s" * 8),
    m.Commit(7),
    m.Verify("ab", 1, 1.0, 10),
    m.Drop("*"),
    m.ListKeys(3, 16),
    m.ReplaceMedium("replace", "disk", "/mnt/new"),
)
_REPLIES = _encoded(
    m.Welcome(m.PROTOCOL, "abc", b"k" * 32, 1 << 20),
    m.Fetched(3, [0, 4096], {"host": 2}, "ok", "why"),
    m.Reserved(3, [0, -1], "full"),
    m.Refused("no"),
    m.ListedKeys(_KEYS, 7),
    m.ReportReply({"blocks": 3, "tiers": [{"tier": "host"}]}),
)
_TO_TARGET = _encoded(
    t.Join(t.TARGET_PROTOCOL, "peer", b"n" * 32, "claims", b"proof"),
    t.PutRecords(bytes(record_of(_NAMESPACE, key_of(0))[:128]) * 2),
    t.GetRecords(**_NAMES, deadline_s=1.0),
    t.ExistBlocks(**_NAMES),
    t.DeleteBlocks(**_NAMES),
    payload_bytes=8192,
)
_FROM_TARGET = _encoded(
    t.RecordsFollow(b"\0\x10\0\0" * 2, "ok", "", 5),
    t.Stored(b"\1\0"),
    t.Challenge(t.TARGET_PROTOCOL, b"n" * 32),
    t.Joined(t.TARGET_PROTOCOL, "abc", b"proof", 3),
    t.Existing(b"\1\0\1"),
    t.Counted(2),
    payload_bytes=8192,
)


def _read(
    open_reader: Callable[[], FrameReader[m.Request] | FrameReader[m.Reply]], data: bytes
) -> bool:
    """Feed a reader in two parts, as a socket does; return whether a message was complete."""
    reader, complete = open_reader(), False
    for part in (data[: len(data) // 3], data[len(data) // 3 :]):
        reader.feed(part)
        while reader.next() is not None:
            complete = True
    return complete


_TARGET_REQUEST = msgspec.msgpack.Decoder(t.TargetRequest)
_TARGET_REPLY = msgspec.msgpack.Decoder(t.TargetReply)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> bool:
    """Decode a header and a body, as a node does on a connection to another node."""
    if len(data) < HEADER_BYTES:
        return False
    head = read_head(data)
    body = data[HEADER_BYTES : HEADER_BYTES + head.body_bytes]
    try:
        message = decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(str(error)) from error
    msgspec.to_builtins(message)
    return True


def _read_record(data: bytes) -> bool:
    header, _ = read_header(data)
    verify(memoryview(data), header.key, header.fingerprint, header.payload_bytes)
    return True


def _read_region(data: bytes) -> bool:
    """Run every parser of disk structures, each with the region life that the input names."""
    header, trailer = _life_of(data), _life_of(data[-region.TRAILER_BYTES :])
    known = (
        region.parse_region_header(data, header.uuid, header.region),
        region.parse_footer(data, trailer, GEOMETRY.region_sectors) is not None,
        region.parse_snapshot(data, header.uuid, GEOMETRY.region_count),
    )
    if not any(known):
        region.parse_superblock(data)
    return True


def _life_of(structure: bytes) -> region.RegionLife:
    """Return the life that the header of a region, a snapshot or a trailer names."""
    _, generation, uuid, index, _ = _HEAD.unpack(structure[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    return region.RegionLife(uuid, index, generation)


def _with_crc(data: bytes) -> bytes:
    """Return a disk structure with the right CRC."""
    at, crc = _crc_of(data) or (0, data[:4])
    return data[:at] + crc + data[at + 4 :]


def _crc_of(data: bytes) -> tuple[int, bytes] | None:
    """Return the offset of a disk structure's CRC and the right CRC, None for other bytes."""
    trailer = data[-region.TRAILER_BYTES :]
    if data.startswith(b"HOLDFAST"):
        at, covered = 12, data[16:]
    elif data.startswith(b"HFR1"):
        at, covered = 4, data[8:]
    elif data.startswith(b"HFS1") and len(data) >= _HEAD.size:
        rows, freed = _COUNTS.unpack_from(data, _COUNTS_AT)
        at, covered = 4, data[8 : region.TRAILER_BYTES + 16 * rows + 8 * freed]
    elif trailer.startswith(b"HFF1") and len(trailer) == region.TRAILER_BYTES:
        _, entries = _COUNTS.unpack_from(trailer, _COUNTS_AT)
        at, end = len(data) - len(trailer) + 4, len(data) - len(trailer)
        covered = data[max(0, end - entries * region.ENTRY_BYTES) : end] + trailer[8:]
    else:
        return None
    return at, zlib.crc32(covered).to_bytes(4, "little")


_HEAD = struct.Struct("<8sQ16sII")
"""The start of region headers, snapshots and trailers: magic and CRC, generation, uuid, counts."""

_COUNTS, _COUNTS_AT = struct.Struct("<II"), 32


def _read_token(data: bytes) -> bool:
    text = data.decode("utf-8", "replace")
    token.check(bytes(32), token.read(text).text, 0.0)
    return True


_MEMBERS = b"""members:
  - {id: flash-1, address: "tcp://10.0.0.1:7070", weight: 4}
  - {id: flash-2, address: "tcp://10.0.0.2:7070", weight: 2, state: draining}
"""


def _read_members(file: Path, data: bytes) -> bool:
    file.write_bytes(data)
    FileSource(str(file)).read()
    return True


_CONFIGS = [
    b"""listen: unix:///run/n.sock
tiers:
  - {kind: host, capacity: 64 MiB}
  - {kind: disk, path: /tmp/x, capacity: 1 GiB, region: 4 MiB}
  - {kind: pool, members: m.yaml, deadline_s: 2.5, ramp_s: 10}
domains: {default: {key_file: team.key}}
write: behind
lease_s: 30
engine: {deadline_s: 5, save: true, model_digest: abc}
scrub: {every_s: 86400, rate: 64 MiB}
""",
    b"listen: [unix:///n.sock, 'tcp://127.0.0.1:0']\ntiers: [{kind: host, capacity: 67108864}]\n",
]


def _load(file: Path, data: bytes) -> bool:
    file.write_bytes(data)
    load(str(file), environment={})
    return True
