import numpy as np

from holdfast.devices.cuda.arena_use import ArenaUse
from holdfast.testing.page_locks import TestLocks

CHUNK = 100
PAYLOAD = 40


class Arena:
    nbytes = 3 * CHUNK

    def __init__(self):
        self.bytes = np.zeros(self.nbytes, np.uint8)
        self.address = self.bytes.ctypes.data


class Registrar:
    def register(self, address, nbytes):
        """Lock nothing."""

    def unregister(self, address):
        """Unlock nothing."""


class LateLocks(TestLocks):
    """Locks whose last chunk is locked just after the first refusal, by another thread."""

    def use(self, ranges):
        is_locked = super().use(ranges)
        if not is_locked:
            self.lock(1)
        return is_locked


def test_a_chunk_that_is_locked_during_the_call_is_no_longer_used_after_its_end():
    locks = LateLocks(Registrar(), Arena(), CHUNK)
    locks.lock(0)
    use = ArenaUse(Arena(), locks, [0, 50, 120], PAYLOAD)
    assert use.locked == [True, True, True]
    use.end()
    use.end()
    assert not locks.uses


def test_each_use_ends_with_its_ranges():
    locks = TestLocks(Registrar(), Arena(), CHUNK)
    for chunk in (0, 1):
        locks.lock(chunk)
        uses = [ArenaUse(Arena(), locks, [0, 50, 120], PAYLOAD) for _ in range(2)]
        assert all(use.locked == [True, True, chunk == 1] for use in uses)
        for left, use in zip((1, 0), uses, strict=True):
            use.end()
            assert bool(locks.uses) == bool(left)
