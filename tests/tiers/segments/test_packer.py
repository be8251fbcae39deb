"""Threads that put segment objects outlast every failure."""

import threading
from contextlib import closing

from holdfast.errors import Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

WITHIN_S = 60.0


class RaisingMedium(MemoryMedium):
    """Raises once for a segment object, when a test asks for it."""

    raises = False

    def put(self, name, parts, deadline):
        if self.raises and name.startswith("7d/"):
            self.raises = False
            raise RuntimeError("a fault that no medium promises")
        return super().put(name, parts, deadline)


def save(tier, blocks, number):
    """Save one block; return the outcome, or nothing if the save does not end."""
    outcomes = []
    thread = threading.Thread(
        target=lambda: outcomes.extend(blocks.save(tier, [number])), daemon=True
    )
    thread.start()
    thread.join(WITHIN_S)
    return outcomes


def test_saves_go_on_after_a_put_that_raised(caplog):
    blocks, medium = ChainedBlocks(65_000), RaisingMedium(MemoryObjects())
    limits = SegmentTierLimits(read_s=60.0, write_s=60.0, ask_s=60.0, writes=1)
    with closing(SegmentTier(medium, SegmentWriter("7d"), limits, "segments")) as tier:
        medium.raises = True
        assert save(tier, blocks, 0) == [Outcome.GONE]
        assert "a segment could not be stored" in caplog.text
        end = threading.Event()
        for _ in range(100):  # the breaker lets a call through after a pause
            if (found := save(tier, blocks, 1)) != [Outcome.GONE]:
                break
            end.wait(0.1)
        assert found == [Outcome.OK]
