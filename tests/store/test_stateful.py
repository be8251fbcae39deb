"""A store over memory that rots, and over memory alone, against a set."""

import random

from hypothesis import settings

from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.stateful import StoreMachine

KIB = 1 << 10
SECRET = {"default": b"s" * 32}


class HostOnly(StoreMachine):
    """Nothing below the host: a restart forgets everything."""

    def open(self) -> Store:
        return Store(128 * KIB, [], SECRET)


class OverRottingMemory(StoreMachine):
    """A tier whose records flip, shrink, swap places and vanish."""

    def __init__(self) -> None:
        self.records: dict = {}
        super().__init__()

    def open(self) -> Store:
        return Store(128 * KIB, [MemoryTier(400 * KIB, self.records)], SECRET)

    def disturb(self, seed: int) -> None:
        dice = random.Random(seed)
        places = sorted(self.records)
        if not places:
            return
        place, other = dice.choice(places), dice.choice(places)
        record = bytearray(self.records[place])
        match dice.randrange(4):
            case 0 if record:
                record[dice.randrange(min(len(record), 128 + 5_000 + 16))] ^= 1 << dice.randrange(8)
                self.records[place] = bytes(record)
            case 1:
                self.records[place] = bytes(record[: dice.randrange(len(record) + 1)])
            case 2:
                self.records[place], self.records[other] = self.records[other], bytes(record)
            case 3:
                del self.records[place]


TestHostOnly = HostOnly.TestCase
TestHostOnly.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestOverRottingMemory = OverRottingMemory.TestCase
TestOverRottingMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
