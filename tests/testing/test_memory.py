"""The tier in memory: what the contract of tiers does not test."""

from holdfast.testing.memory import MemoryTier


def test_the_usage_of_a_memory_tier_is_read_under_its_lock():
    tier = MemoryTier(1 << 20)

    class Guarded(dict):
        def values(self):
            assert tier._lock.locked()
            return super().values()

    tier._sizes = Guarded(tier._sizes)
    assert tier.usage().used_bytes == 0
