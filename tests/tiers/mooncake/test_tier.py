"""The Mooncake tier keeps the shared tier's contract with a real master and memory server."""

import contextlib
import threading

import pytest

from holdfast.blocks.envelope import SEAL_AES_GCM
from holdfast.buffers import aligned_buffer
from holdfast.byte_size import Size
from holdfast.codec.codec import codec_named
from holdfast.errors import Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.payloads import (
    encoded_record,
    fill_record,
    header_of,
    is_right,
    is_right_encoded,
    key_of,
    namespace_of,
    record_of,
)
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.base import Place, TierGet, TierPut, segment_place
from holdfast.tiers.mooncake.kind import MooncakeOptions
from holdfast.tiers.mooncake.tier import NOT_FOUND, MooncakeTier
from holdfast_bench.peers.mooncake_server import MooncakeServers

DEADLINE_S = 6.0
LANE_BYTES = 16 << 20


@pytest.mark.usefixtures("_mooncake")
class TestMooncakeTier(SharedTierContract):
    deadline_s = DEADLINE_S

    def make_remote_side(self, folder):
        servers = MooncakeServers(folder / "servers", 256 << 20)
        servers.start()
        return servers

    def make_tier(self, remote_side):
        return MooncakeTier(
            MooncakeOptions(
                master=remote_side.address,
                lane=Size(LANE_BYTES),
                deadline_s=DEADLINE_S,
                ask_s=DEADLINE_S,
            )
        )


@pytest.fixture
def mooncake(_mooncake, tmp_path):
    """Yield the options of a tier on a Mooncake Store of this test."""
    servers = MooncakeServers(tmp_path / "servers", 256 << 20)
    servers.start()
    yield MooncakeOptions(
        master=servers.address, lane=Size(LANE_BYTES), deadline_s=DEADLINE_S, ask_s=DEADLINE_S
    )
    servers.close()


def test_encoded_and_raw_records_of_one_namespace_are_read_as_they_were_written(mooncake):
    namespace, keys = namespace_of(300_000), [key_of(n) for n in range(6)]
    headers = [header_of(namespace, key) for key in keys]
    records = [encoded_record(header, codec_named("planes")) for header in headers[:5]]
    assert all(len(record) < namespace.slot_bytes for record in records)
    records.append(record_of(namespace, keys[5]))
    with contextlib.closing(MooncakeTier(mooncake)) as tier:
        place = segment_place(headers[0].segment)
        assert tier.write([TierPut(place, record) for record in records]) == [Outcome.OK] * 6
    with contextlib.closing(MooncakeTier(mooncake)) as tier:
        into = [aligned_buffer(namespace.slot_bytes) for _ in keys]
        gets = [TierGet(place, *each, namespace) for each in zip(keys, into, strict=True)]
        assert tier.read(gets) == [Outcome.OK] * 6
    for key, record in zip(keys[:5], into, strict=False):
        assert is_right_encoded(record, namespace, key)
    assert is_right(into[5], namespace, keys[5])


def test_a_lookup_does_not_wait_for_a_write_that_waits_for_the_master(monkeypatch):
    pytest.importorskip("mooncake")
    dialled, answered = threading.Event(), threading.Event()

    def dial(_endpoint, _deadline):
        dialled.set()
        answered.wait(250)
        raise ConnectionRefusedError

    monkeypatch.setattr("holdfast.tiers.mooncake.tier.dial", dial)
    options = MooncakeOptions(master="tcp://127.0.0.1:9", deadline_s=30.0, ask_s=0.2)
    blocks = ChainedBlocks(4_000)
    with contextlib.closing(MooncakeTier(options)) as tier:
        writer = threading.Thread(target=blocks.save, args=(tier, range(2)))
        writer.start()
        assert dialled.wait(60)
        assert tier.held(blocks.namespace, blocks.keys(2), 0) == 0
        assert writer.is_alive()  # it still waits for the server
        answered.set()
        writer.join(30)


@pytest.mark.parametrize(
    ("answer", "stored", "left"),
    [
        ((Outcome.OK, [0, NOT_FOUND]), Outcome.OK, 0),
        ((Outcome.OK, [0, -1]), Outcome.OK, 1),
        ((Outcome.LATE, []), Outcome.OK, 2),
        ((Outcome.OK, [0, 0]), Outcome.GONE, 2),
    ],
)
def test_a_record_is_unverified_until_it_was_deleted_and_written_again(
    monkeypatch, answer, stored, left
):
    pytest.importorskip("mooncake")
    namespace, puts, requests = namespace_of(300), [], []
    with contextlib.closing(MooncakeTier(MooncakeOptions(master="tcp://127.0.0.1:9"))) as tier:
        for number in range(2):
            header = header_of(namespace, key_of(number))._replace(seal=SEAL_AES_GCM)
            record = memoryview(bytearray(namespace.slot_bytes))
            fill_record(record, header)
            puts.append(TierPut(Place(0), record))
            tier._unverified.add(namespace, header.key, header)

        def ask(request, _deadline):
            requests.append((request.call, len(request.keys)))
            return answer

        def write(piece, outcomes, _deadline):
            for item in piece:
                outcomes[item.number] = stored

        monkeypatch.setattr(tier, "_request", ask)
        monkeypatch.setattr(tier, "_write", write)
        assert tier.write(puts) == [stored] * 2
        assert requests == [("remove", 2)]
        assert len(tier._unverified) == left
