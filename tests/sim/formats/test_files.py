"""Traces are read from files, folders and archives, plain or compressed."""

import bz2
import gzip
import io
import json
import lzma
import tarfile

import pytest

from holdfast.errors import TraceError
from holdfast.sim.formats.load import load

ROWS = [{"timestamp": 1000 * n * n, "input_length": 512, "hash_ids": [n]} for n in range(6)]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
PACKED = {"": bytes, "gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


def tar(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize("pack", PACKED)
def test_a_compressed_file_or_archive_loads_like_a_plain_file(tmp_path, pack):
    expected = [0, 1, 4, 9, 16, 25]
    one, archive = tmp_path / "traffic", tmp_path / "traffic.tar"
    one.write_bytes(PACKED[pack](b"".join(LINES)))
    assert load(one).time_s.tolist() == expected
    halves = {"set/b.jsonl": b"".join(LINES[3:]), "set/a.jsonl": b"".join(LINES[:3])}
    archive.write_bytes(PACKED[pack](tar(**halves, **{"set/README.md": b"about"})))
    trace = load(archive)
    assert (trace.name, trace.time_s.tolist()) == ("traffic", expected)
    archive.write_bytes(PACKED[pack](tar(requests=gzip.compress(b"".join(LINES)))))
    assert load(archive).requests == 6


@pytest.mark.parametrize("pack", ["gz", "xz", "bz2"])
def test_compressed_data_that_is_cut_or_damaged_is_refused(tmp_path, pack):
    path, whole = tmp_path / "traffic", PACKED[pack](b"".join(LINES * 999))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="data ends early: the file is truncated"):
        load(path)
    path.write_bytes(whole[:30] + bytes(40) + whole[70:])
    with pytest.raises(TraceError, match=r"data is damaged|ends early"):
        load(path)


def test_a_wrong_line_of_an_archive_is_named_with_its_member(tmp_path):
    path = tmp_path / "set.tar.xz"
    path.write_bytes(lzma.compress(tar(**{"a.jsonl": LINES[0], "b.jsonl": LINES[1] + b"7\n"})))
    with pytest.raises(TraceError, match=r"set.tar.xz/b.jsonl:2: Expected `object`"):
        load(path)


def test_a_file_that_is_not_a_trace_is_refused_with_its_kind(tmp_path):
    path = tmp_path / "traffic"
    for content, message in (
        (tar(README=b"", LICENSE=b""), "no .json, .jsonl, .csv or .log file in this archive"),
        (b"PK\x03\x04" + bytes(99), "a zip archive; unpack it"),
        (b"\x28\xb5\x2f\xfd" + bytes(99), "compressed by zstd; decompress it"),
        (tar(**{"a.csv": b"x"})[:700], "the archive is damaged|unknown format"),
    ):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=message):
            load(path)
