"""Mutated frames, messages, envelopes, regions, tokens and settings: refused, or understood.

Every parser that reads what others wrote gets inputs that are nearly right. It may return or raise
the one error it promises; anything else is a failure, and so is a second of CPU time for one input
or memory that grows beyond a bound. Where a checksum would keep damage from what lies behind it,
every second input gets the right one. The seeds are made here; `tests/corpus` holds inputs that
once were trouble, or look like it.
"""

from __future__ import annotations

import random
import resource
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.blocks.envelope import read_header
from holdfast.codec.pack import verify
from holdfast.config import load
from holdfast.errors import ConfigError, FormatError, HoldfastError, MembershipError, ProtocolError
from holdfast.limits import KIB, MIB
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.payloads import key_of, record_of, world_of
from holdfast.testing.workload import GEOMETRY, live
from holdfast.tiers.disk import region
from holdfast.tiers.pool.member_file import MemberFile
from holdfast.wire import messages as m
from holdfast.wire import target_messages as t
from holdfast.wire import token
from holdfast.wire.frame import (
    HEADER_BYTES,
    FrameReader,
    encode,
    read_head,
    reply_reader,
    request_reader,
)

CPU_S_MAX = 1.0
GROWTH_BYTES_MAX = 256 * MIB
INPUT_BYTES_MAX = 64 * KIB
SHOWN_BYTES = 96
CHANGES_MAX = 8
MENDED_CHANCE = 0.5
PROVEN_AT = 2_000
"""Of so many inputs some must be understood."""

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 62)
_WORLD = world_of(3_000)
_KEYS = b"".join(key_of(number) for number in range(5))
_NAMES = {**_WORLD._asdict(), "keys": _KEYS}


class Subject(NamedTuple):
    """One parser: inputs that it takes, how to feed it, and the errors it may raise.

    `parse` returns False where an input is too short to say anything. `mend`, where there is one,
    makes the checksum right again, so that what lies behind it is read.
    """

    seeds: Sequence[bytes]
    parse: Callable[[bytes], bool]
    refusals: tuple[type[Exception], ...]
    mend: Callable[[bytes], bytes] | None = None


def run(order: Order) -> Iterator[Tally]:
    """Feed every parser its share."""
    subjects = every_subject(order.folder)
    for name, subject in subjects.items():
        yield _feed(f"fuzz.{name}", subject, order.share(len(subjects)))


def every_subject(folder: Path) -> dict[str, Subject]:
    """Return what is fuzzed, by name; `folder` is for files that a parser wants."""
    record = bytes(record_of(_WORLD, key_of(0)))
    image = bytes(live(1).medium.image)
    sectors = [image[at : at + region.SECTOR] for at in range(0, len(image), region.SECTOR)]
    return {
        "requests": Subject(_requests(), lambda data: _read(request_reader(), data),
                            (ProtocolError,)),
        "replies": Subject(_replies(), lambda data: _read(reply_reader(), data), (ProtocolError,)),
        "target.requests": Subject(_to_target(), lambda data: _decode(_TARGET_REQUEST, data),
                                   (ProtocolError,)),
        "target.replies": Subject(_from_target(), lambda data: _decode(_TARGET_REPLY, data),
                                  (ProtocolError,)),
        "envelope": Subject([record, record[:128]], _read_record, (FormatError,)),
        "region": Subject([each for each in sectors if _crc_of(each)], _read_region,
                          (FormatError,), _with_crc),
        "token": Subject([token.issue(bytes(32), "n", ("read",), 60, 0).encode()], _read_token,
                         (HoldfastError,)),
        "members": Subject(
            [_MEMBERS],
            lambda data: _read_members(folder / "fuzzed-members.yaml", data),
            (MembershipError,),
        ),
        "config": Subject(_CONFIGS, lambda data: _load(folder / "fuzzed.yaml", data),
                          (ConfigError,)),
    }  # fmt: skip


def _feed(what: str, subject: Subject, order: Order) -> Tally:
    """Mutate, parse, look at the outcome, the time and the memory."""
    tally, before = Tally(what, "inputs"), _peak_bytes()
    for dice in order.rounds(tally):
        data = mutated(subject.seeds, dice)
        if subject.mend and dice.random() < MENDED_CHANCE:
            data = subject.mend(data)
        start = time.thread_time()
        try:
            tally.counts["understood" if subject.parse(data) else "too short"] += 1
        except subject.refusals:
            tally.counts["refused"] += 1
        except Exception as error:  # noqa: BLE001  # whatever it is, this is what is looked for
            tally.fail(f"{error!r:.200} for {data[:SHOWN_BYTES].hex()} of {len(data)} bytes")
        spent = time.thread_time() - start
        tally.expect(spent < CPU_S_MAX, f"{spent:.2f} s for {data[:SHOWN_BYTES].hex()}")
        tally.tried += 1
    growth = _peak_bytes() - before
    tally.figures["growth_mib"] = growth / MIB
    tally.expect(growth < GROWTH_BYTES_MAX, f"memory grew by {growth / MIB:.0f} MiB")
    refused, understood = tally.counts["refused"], tally.counts["understood"]
    order.expect_enough(tally, refused, "nothing was refused: the inputs are too tame")
    if tally.tried >= PROVEN_AT:
        tally.expect(understood, "nothing was understood: the inputs are too wild")
    return tally


def mutated(seeds: Sequence[bytes], dice: random.Random) -> bytes:
    """Return a seed with a few changes; now and then spliced with another."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.randint(1, CHANGES_MAX)):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(8):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << dice.randrange(8)
            case 2:
                data[at : at + 1] = bytes([dice.randrange(256)])
            case 3:
                number = struct.pack("<Q", dice.choice(_INTERESTING))[: dice.choice((1, 2, 4, 8))]
                data[at : at + len(number)] = number
            case 4:
                del data[at : at + dice.choice((1, 2, 16, 256))]
            case 5:
                piece = data[at : at + dice.choice((1, 8, 64))]
                data[at:at] = piece * dice.choice((1, 2, 50))
            case 6:
                other = dice.choice(seeds)
                data[at:] = other[dice.randrange(len(other) + 1) :]
            case _:
                data[at:at] = dice.choice(_NESTS) * dice.choice((1, 10, 1_000))
    return bytes(data[:INPUT_BYTES_MAX])


_NESTS = (b"[", b"{a: ", b"- ", b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"&a [*a, ", b"\0")
"""What opens something in YAML and MessagePack."""


def _peak_bytes() -> int:
    return KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _requests() -> list[bytes]:
    said: list[m.Request] = [
        m.Hello(m.PROTOCOL, "engine", b"f" * 16, 4096, 128, "default", "a model"),
        m.Cover(_KEYS),
        m.Fetch(_KEYS, 1.0),
        m.Reserve(_KEYS, b"p" * 16, 3, b"s" * 8),
        m.Commit(7),
        m.Verify("ab", 1, 1.0, 10),
        m.Drop("*"),
    ]
    return [bytes(encode(number, each)) for number, each in enumerate(said)]


def _replies() -> list[bytes]:
    said: list[m.Reply] = [
        m.Welcome(m.PROTOCOL, "abc", b"k" * 32, 1 << 20),
        m.Fetched(3, [0, 4096], {"host": 2}, "ok", "why"),
        m.Reserved(3, [0, -1], "full"),
        m.Refused("no"),
        m.Report({"blocks": 3, "tiers": [{"tier": "host"}]}),
    ]
    return [bytes(encode(number, each)) for number, each in enumerate(said)]


def _to_target() -> list[bytes]:
    headers = bytes(record_of(_WORLD, key_of(0))[:128])
    said: list[t.TargetRequest] = [
        t.Join(t.TARGET_PROTOCOL, "peer", b"n" * 32, "claims", b"proof"),
        t.Put(headers * 2),
        t.Get(**_NAMES, deadline_s=1.0),
        t.Exist(**_NAMES),
        t.Delete(**_NAMES),
        t.Lease(**_NAMES, ttl_s=5.0),
        t.Stage(**_NAMES),
    ]
    return [bytes(encode(number, each, 8192)) for number, each in enumerate(said)]


def _from_target() -> list[bytes]:
    said: list[t.TargetReply] = [
        t.Records(2, "ok", "", 5),
        t.Stored(b"\1\0"),
        t.Challenge(t.TARGET_PROTOCOL, b"n" * 32),
        t.Joined(t.TARGET_PROTOCOL, "abc", b"proof", 3),
        t.Existing(b"\1\0\1"),
        t.Counted(2),
    ]
    return [bytes(encode(number, each, 8192)) for number, each in enumerate(said)]


def _read(reader: FrameReader[m.Request] | FrameReader[m.Reply], data: bytes) -> bool:
    """Feed a reader as a socket would, in two parts; return whether a message came to its end."""
    came = False
    for part in (data[: len(data) // 3], data[len(data) // 3 :]):
        left = memoryview(part)
        while left:
            room = reader.room()
            size = min(len(room), len(left))
            room[:size] = left[:size]
            reader.took(size)
            left = left[size:]
            while reader.next() is not None:
                came = True
    return came


_TARGET_REQUEST = msgspec.msgpack.Decoder(t.TargetRequest)
_TARGET_REPLY = msgspec.msgpack.Decoder(t.TargetReply)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> bool:
    """Read a head and a body, as one end of a connection between nodes does."""
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
    """Let every parser of the disk's structures look at it, each told the life that it names."""
    header, trailer = _life_of(data), _life_of(data[-region.TRAILER_BYTES :])
    known = (
        region.parse_region_header(data, header.uuid, header.region),
        region.parse_footer(data, trailer, GEOMETRY.region_sectors) is not None,
        region.parse_snapshot(data, header.uuid, GEOMETRY.region_count),
    )
    if not any(known):
        region.parse_superblock(data)
    return True


def _life_of(structure: bytes) -> region.Life:
    """Return the life that the head of a region, a snapshot or a trailer names."""
    _, generation, uuid, index, _ = _HEAD.unpack(structure[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    return region.Life(uuid, index, generation)


def _with_crc(data: bytes) -> bytes:
    """Return a structure of the disk with the CRC that it ought to have."""
    at, crc = _crc_of(data) or (0, data[:4])
    return data[:at] + crc + data[at + 4 :]


def _crc_of(data: bytes) -> tuple[int, bytes] | None:
    """Return where a structure of the disk keeps its CRC, and the right one; None if it is none."""
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
"""How headers of regions, snapshots and trailers begin: magic and CRC, generation, uuid, counts."""

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
    MemberFile(str(file)).read()
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
