"""A process starts again, and what it has on flash cannot be reached any more.

Mooncake: a client that restarts within its lease's time finds none of its blocks; a master that
restarts has lost its metadata. Stores that write their index only at a clean end start cold.
Threads: https://github.com/kvcache-ai/Mooncake/issues/3052
https://github.com/kvcache-ai/Mooncake/issues/2306
https://github.com/kvcache-ai/Mooncake/issues/2246
"""

from holdfast.testing.extents import MemoryExtents
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.campaigns.contexts import Contexts, chain_of

CHAIN = chain_of("on flash", 6)


def disk(medium):
    return DiskTier(DiskConfig(path="memory", capacity_bytes=medium.size), None, lambda _: medium)


def test_every_block_on_disk_is_recovered_after_a_crash(open_store):
    medium = MemoryExtents.formatted(64 * SECTOR, 4)
    before = Contexts(open_store(disk(medium)), 9_000)
    before.save(CHAIN)
    before.wait_written()
    left = MemoryExtents(medium.image)  # what a crash leaves: nothing was sealed or closed
    after = Contexts(open_store(disk(left)), 9_000)
    after.await_recovery()
    assert after.read(CHAIN) == 6
