"""A striped pool over real targets: a context survives the loss of one, and parity is accounted."""

from contextlib import closing

import pytest

from holdfast.errors import Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import key_of, record_of
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import HOST, StoreView
from holdfast.tiers.pool.parity import parity_key, parity_namespace
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.campaigns.contexts import Contexts, keys_of
from holdfast_bench.harness.pool import ManualMembers

TARGETS = 5
BLOCKS = 70
PAYLOAD_BYTES = 60_000
SECRET = b"s" * 32
PATIENT = PoolTierOptions(deadline_s=60.0, ask_s=60.0)


@pytest.fixture
def targets(serve_here):
    namespace = ChainedBlocks(PAYLOAD_BYTES).namespace
    return [serve_here(namespace) for _ in range(TARGETS)]


def pool_over(targets) -> PoolTier:
    members = [Member(id=f"t{n}", address=target.address) for n, target in enumerate(targets)]
    return PoolTier(ManualMembers(members), lambda member: TargetClient(member.address), PATIENT)


def test_a_context_is_whole_after_the_loss_of_any_one_target(targets):
    blocks = ChainedBlocks(PAYLOAD_BYTES)
    with closing(pool_over(targets)) as pool:
        assert set(blocks.save(pool, range(BLOCKS))) == {Outcome.OK}
    targets[2].close()
    with closing(pool_over(targets)) as pool:
        assert pool.held(blocks.namespace, blocks.keys(BLOCKS), 0) == BLOCKS
        assert set(blocks.load(pool, range(BLOCKS))) == {Outcome.OK}
        assert pool.usage().rebuilt > 0


def test_rebuilt_blocks_reach_the_store_of_another_host_verified(targets):
    keys = keys_of(SECRET, list(range(128 * BLOCKS)))
    with Store(32 * MIB, [pool_over(targets)], {"default": SECRET}) as writer:
        writer.start()
        contexts = Contexts(writer, PAYLOAD_BYTES)
        contexts.save(keys)
        contexts.wait_written()
    targets[0].close()
    with Store(32 * MIB, [pool_over(targets)], {"default": SECRET}) as reader:
        reader.start()
        contexts = Contexts(reader, PAYLOAD_BYTES)
        assert reader.look(contexts.namespace, keys, 60.0).blocks == BLOCKS
        assert contexts.read(keys, 60.0) == BLOCKS


def test_parity_records_count_for_the_domain_of_their_blocks(targets):
    blocks = ChainedBlocks(PAYLOAD_BYTES)
    with closing(pool_over(targets)) as pool:
        blocks.save(pool, range(4))
        [counted] = [
            (target, namespace, flags)
            for target in targets
            for namespace in [parity_namespace(blocks.namespace)]
            if (flags := target.store.held(namespace, [parity_key(blocks.key(0), 4)])) == b"\1"
        ]
        target, namespace, _ = counted
        [parity] = [
            line for line in target.store.listing() if line["domain"] == namespace.domain.hex()
        ]
        assert parity["blocks"] == 1
        pool.delete(blocks.gets(range(4)))
        assert target.store.held(namespace, [parity_key(blocks.key(0), 4)]) == b"\0"


def test_a_target_counts_the_blocks_in_use_that_it_has(targets):
    namespace = targets[0].namespace
    client, keys = targets[0].target, [key_of(number) for number in range(4)]
    client.put([record_of(namespace, key) for key in keys[:3]], 60)
    assert client.use(namespace, keys[1:], 60) == (2, Outcome.OK)


def test_sealed_blocks_are_rebuilt_without_their_key(targets):
    """The targets have ciphertext only; the reader that has the key opens what it rebuilt."""
    pytest.importorskip("cryptography")
    secret = b"e" * 32
    ring = KeyRing(None, derives=True)
    ring.enrol("default", secret)
    options = StoreOptions(ring=ring)
    with Store(32 * MIB, [pool_over(targets)], {"default": secret}, options) as writer:
        writer.start()
        contexts = Contexts(writer, PAYLOAD_BYTES)
        keys = keys_of(secret, list(range(128 * BLOCKS)))
        contexts.save(keys)
        contexts.wait_written()
    targets[3].close()
    pool = pool_over(targets)
    with Store(32 * MIB, [pool], {"default": secret}, options) as reader:
        reader.start()
        contexts = Contexts(reader, PAYLOAD_BYTES)
        assert reader.look(contexts.namespace, keys, 60.0).blocks == BLOCKS
        assert contexts.read(keys, 60.0) == BLOCKS
        assert pool.usage().rebuilt > 0


@pytest.mark.parametrize("count", [1, TARGETS])
def test_announced_blocks_are_in_the_memory_of_their_targets_before_they_are_read(
    serve_here, count
):
    blocks = ChainedBlocks(PAYLOAD_BYTES)
    targets = [
        serve_here(blocks.namespace, tiers=[MemoryTier(64 * MIB, name="disk")])
        for _ in range(count)
    ]
    with closing(pool_over(targets)) as pool:
        assert set(blocks.save(pool, range(BLOCKS))) == {Outcome.OK}
        for target in targets:
            StoreView(target.store).wait_until_written()
            leave_all(target.store)
        assert in_memory(targets) == 0
        pool.announce(blocks.namespace, blocks.keys(BLOCKS), 0, 0.0)
        StoreView(targets[0].store).wait_until(
            lambda: in_memory(targets) >= BLOCKS, "the targets have read their blocks"
        )
        assert set(blocks.load(pool, range(BLOCKS))) == {Outcome.OK}


def in_memory(targets):
    """Return how many blocks the targets have in memory."""
    return sum(len(StoreView(target.store).copies(HOST)) for target in targets)
