"""The tier in memory: what the contract of tiers does not test."""

from holdfast.testing.memory import MemoryTier


def test_its_usage_is_read_while_no_other_thread_writes():
    tier = MemoryTier(1 << 20)

    class Guarded(dict):
        def values(self):
            assert tier._lock.locked()
            return super().values()

    tier._sizes = Guarded(tier._sizes)
    assert tier.usage().used_bytes == 0
