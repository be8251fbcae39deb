"""On the way down: what is dropped or found bad while it is written does not come back."""

import threading

from holdfast.errors import Outcome
from holdfast.store.states import HOST
from holdfast.testing.memory import MemoryTier

MIB = 1 << 20


class HeldTier(MemoryTier):
    """Writes only once it is let go on."""

    def __init__(self) -> None:
        super().__init__(64 * MIB)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write(self, batch):
        self.reached.set()
        assert self.go_on.wait(20)
        return super().write(batch)


def test_a_block_dropped_while_it_is_written_stays_dropped(rig) -> None:
    one = rig(2 * MIB, HeldTier())
    chain = one.chain(1, 4)
    one.save(chain)
    assert one.tier.reached.wait(20)
    assert one.store.drop("*") == {"dropped": 4}
    one.tier.go_on.set()
    one.settle()
    assert one.store.cover(one.world, chain.keys).blocks == 0
    assert one.tier.usage().records == 0
    assert one.save(chain) == 4


def test_a_block_found_bad_while_it_is_written_is_not_published_below(rig) -> None:
    one = rig(2 * MIB, HeldTier())
    chain = one.chain(1, 2)
    one.save(chain)
    assert one.tier.reached.wait(20)
    states = one.store.states
    with states.lock:
        states.quarantine(states.index.find(chain.keys[1]), HOST, Outcome.CORRUPT)
    one.tier.go_on.set()
    one.settle()
    assert one.store.cover(one.world, chain.keys).blocks == 1
    assert one.save(chain) == 1, "so it is really written again"
