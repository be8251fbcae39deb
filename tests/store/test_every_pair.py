"""One scenario over every ordered pair of kinds of tiers: blocks move from one to the other.

A block is saved to the source only. A source that names what it evicts is filled, so that the block
moves down to the target; from any other source the block is used, so that it moves up to the
target. Then the source loses it, and a fetch finds it on the target with the right bytes.
"""

import contextlib
import itertools

import numpy as np
import pytest
from obstore.store import MemoryStore

from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace
from holdfast.byte_size import Size
from holdfast.codec.pack import payload
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.membership.membership import MembershipOptions
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetLimits, TargetService
from holdfast.policy.movement import Intake
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.payloads import payload_of
from holdfast.testing.store_control import leave
from holdfast.testing.store_view import HOST, StoreView
from holdfast.tiers.base import NamesCandidates
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.files.kind import KIND as FILES
from holdfast.tiers.files.kind import FilesOptions
from holdfast.tiers.kind import TierContext
from holdfast.tiers.object.kind import ObjectOptions
from holdfast.tiers.object.medium import ObjectMedium
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.tiers.segments.options import CAPACITY_MIN, open_segment_tier
from holdfast.tiers.valkey.kind import ValkeyOptions
from holdfast.tiers.valkey.tier import ValkeyTier
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.peers import valkey_server
from holdfast_bench.peers.valkey_server import ValkeyServers

SECRET = b"s" * 32
PAYLOAD = 125_000
BLOCK_TOKENS = 16
BLOCKS = 4
CAPACITY = Size(4 * MIB)
FILLERS = 40
"""Blocks that fill a tier, a chain each."""

PATIENT = {"deadline_s": 60.0, "ask_s": 60.0, "gather_s": 0.0}
"""Options of tiers of segments: no deadline that a busy machine misses."""

KINDS = ("memory", "cxl", "disk", "shared memory", "pool", "files", "object", "valkey")
PAIRS = list(itertools.permutations(KINDS, 2))


class OneTarget:
    """The list of a pool's members: one target."""

    def __init__(self, address):
        self.members = [Member(id="one", address=address)]

    def watch(self, on_members):
        on_members(self.members)

    def trouble(self):
        return ""

    def close(self):
        pass


@pytest.fixture
def tier_of(tmp_path, monkeypatch):
    """Return a function that opens a tier of a kind, with what it needs.

    The bucket is one in memory, behind the client of a real one. Housekeeping does not run: its
    probes of tiers are uses.
    """
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 3_600.0)
    with contextlib.ExitStack() as undo:

        def open_pool():
            far = Store(64 * MIB, [], {"default": SECRET}, StoreOptions(serves_peers=True))
            undo.callback(far.close)
            far.start()
            listener = bind("tcp://127.0.0.1:0")
            service = TargetService(far, TargetLimits())
            server = TargetServer(listener, service, EntryRules())
            server.start()
            undo.callback(server.close)
            options = PoolTierOptions(
                deadline_s=60.0,
                ask_s=60.0,
                membership=MembershipOptions(ramp_s=0.0, transient_s=0.0, unseen_s=0.0),
            )
            source = OneTarget(address_of(listener))
            return PoolTier(source, lambda member: TargetClient(member.address), options)

        def open_valkey():
            if not valkey_server.program():
                pytest.skip("no Redis or Valkey server is installed")
            servers = ValkeyServers(tmp_path / "servers", 1)
            undo.callback(servers.close)
            servers.start()
            options = ValkeyOptions(address=list(servers.addresses), deadline_s=60.0, ask_s=60.0)
            return ValkeyTier(options)

        def open_files():
            (folder := tmp_path / "shared").mkdir()
            options = FilesOptions(path=str(folder), capacity=Size(CAPACITY_MIN), **PATIENT)
            return FILES.open(options, TierContext("tiers.1", "files", 1))

        def open_bucket():
            options = ObjectOptions(url="s3://bucket/prefix", **PATIENT)
            medium = ObjectMedium(MemoryStore(), options, "object")
            requests = options.connections, options.write_connections
            return open_segment_tier(medium, options, options.capacity, requests, "object")

        def make(kind):
            match kind:
                case "memory":
                    return MemoryTier(CAPACITY)
                case "cxl":
                    return CxlTier(CxlOptions(capacity=CAPACITY, node="any"))
                case "disk":
                    return DiskTier(
                        DiskConfig(path=str(tmp_path / "disk"), capacity_bytes=CAPACITY)
                    )
                case "shared memory":
                    return SharedMemoryTier({})
                case "pool":
                    return open_pool()
                case "files":
                    return open_files()
                case "object":
                    return open_bucket()
                case _:
                    return open_valkey()

        yield make


class Scenario:
    """One store over two tiers, and the contexts that pass through it."""

    def __init__(self, lower, source, target):
        self.source, self.target = source, target
        rules = {
            source: TierRules(intake=Intake(saves=True, evicted="never", fetched="never")),
            target: TierRules(intake=Intake(saves=False, evicted="reused", fetched="reused")),
        }
        self.store = Store(64 * MIB, lower, {"default": SECRET}, StoreOptions(rules=rules))
        self.store.start()
        self.key, domain = self.store.domain("default")
        self.namespace = Namespace(b"f" * 16, domain, PAYLOAD, BLOCK_TOKENS)
        self.view = StoreView(self.store)

    def chain(self, seed, blocks):
        chain = Chain(self.key, self.namespace.fingerprint, BLOCK_TOKENS)
        chain.extend(np.random.default_rng(seed).integers(0, 1_000, blocks * BLOCK_TOKENS))
        return chain

    def save(self, chain):
        reserved = self.store.reserve(self.namespace, chain.keys, chain.parent(0), 0)
        arena = self.store.arena(self.namespace.domain).view
        for key, place in zip(chain.keys, reserved.places, strict=True):
            payload(arena[place:], PAYLOAD)[:] = payload_of(key, PAYLOAD)
        assert self.store.commit(reserved.ticket) == len(chain.keys)
        self.wait()

    def fetch(self, chain):
        fetched = self.store.fetch(self.namespace, chain.keys, 60.0)
        arena = self.store.arena(self.namespace.domain).view
        for key, place in zip(chain.keys, fetched.places, strict=False):
            assert bytes(payload(arena[place:], PAYLOAD)) == bytes(payload_of(key, PAYLOAD))
        assert self.store.release(fetched.lease)
        self.wait()
        return len(fetched.places)

    def wait(self):
        """Wait until no move is queued or running."""
        self.view.wait_until_written()

    def leave(self, chain, tier):
        """Take a chain off one tier."""
        leave(self.store, self.namespace, chain.keys, tier)

    def tiers(self, chain):
        return [self.view.tiers(self.namespace, key) for key in chain.keys]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_a_block_moves_from_any_kind_of_tier_to_any_other(tier_of, source, target):
    from_tier, to_tier = tier_of(source), tier_of(target)
    moves_down = isinstance(from_tier, NamesCandidates)
    lower = [from_tier, to_tier] if moves_down else [to_tier, from_tier]
    numbers = (1, 2) if moves_down else (2, 1)
    one = Scenario(lower, *numbers)
    try:
        chain = one.chain(1, BLOCKS)
        one.save(chain)
        assert one.tiers(chain) == [[HOST, one.source]] * BLOCKS
        assert one.fetch(chain) == BLOCKS, "now it was used twice"
        one.leave(chain, HOST)
        if moves_down:
            for seed in range(2, 2 + FILLERS):
                filler = one.chain(seed, 1)
                one.save(filler)
                one.leave(filler, HOST)
        else:
            assert one.fetch(chain) == BLOCKS
            one.leave(chain, HOST)
            one.leave(chain, one.source)
        assert one.tiers(chain) == [[one.target]] * BLOCKS
        assert one.fetch(chain) == BLOCKS
        moved = sum(n for (_, target, _), n in one.view.moves.items() if target == one.target)
        assert moved == BLOCKS, "and nothing else moved"
        assert one.view.dropped_unmoved.total() == 0
    finally:
        one.store.close()
