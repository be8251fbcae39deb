"""A tier that nobody has read is met before the first plan needs to know how fast it is."""

import threading
import time

from holdfast.store.meet import BLOCKS, meet, strangers
from holdfast.testing.memory import MemoryTier

MIB = 1 << 20


class Timed(MemoryTier):
    """Each block moves the clock by a second."""

    def read(self, batch):
        self.clock.advance(len(batch))
        return super().read(batch)


def test_a_tier_is_a_stranger_from_its_first_blocks_to_its_first_read(rig):
    one = rig(2 * MIB, Timed(8 * MIB))
    one.tier.clock = one.clock
    assert strangers(one.store) == []
    one.save(one.chain(1, BLOCKS))
    one.settle()
    meet(one.store, 1)
    assert strangers(one.store) == []
    estimate = one.store.judgement.estimates(one.world.domain)[1]
    assert estimate.seconds(BLOCKS * one.world.record_bytes) > BLOCKS / 2
    before = one.clock.now()
    meet(one.store, 1)
    assert one.clock.now() == before, "once is enough"


def test_an_empty_tier_is_not_met(rig):
    one = rig(2 * MIB, MemoryTier(8 * MIB))
    meet(one.store, 1)
    assert one.store.judgement.reads(1) == 0


def test_what_is_met_can_go_meanwhile(rig):
    """Blocks that are dropped while they are read leave nothing behind."""
    one = rig(2 * MIB, MemoryTier(8 * MIB))
    one.save(one.chain(1, BLOCKS))
    one.settle()
    reached, go_on = threading.Event(), threading.Event()
    read = one.tier.read

    def slowly(batch):
        reached.set()
        assert go_on.wait(60)
        return read(batch)

    one.tier.read = slowly
    meeting = threading.Thread(target=meet, args=(one.store, 1))
    if not one.store.judgement.reads(1):
        meeting.start()
        assert reached.wait(60)
    one.store.drop("*")
    go_on.set()
    if meeting.ident is not None:
        meeting.join()
    deadline = time.monotonic() + 60
    while one.store.judgement.estimates(one.world.domain)[1].queued_bytes or len(
        one.store.states.index
    ):
        assert time.monotonic() < deadline, "something was left behind"
