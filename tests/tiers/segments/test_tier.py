"""A segment tier keeps the contract of shared tiers, on a medium in memory."""

from holdfast.errors import Outcome
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter


class MemorySide(MemoryObjects):
    def kill(self):
        self.fault = lambda verb, name: Outcome.GONE
        self.objects.clear()

    def stall(self):
        self.fault = lambda verb, name: Outcome.LATE

    def wake(self):
        self.fault = None

    def restart(self):
        self.fault = None

    def close(self):
        pass


def open_tier(objects, **limits):
    limits = SegmentTierLimits(**{"write_s": 2.0, "ask_s": 2.0, "poll_s": 0.2, **limits})
    return SegmentTier(MemoryMedium(objects), SegmentWriter("7d"), limits, "segments")


class TestSegmentTier(SharedTierContract):
    answers_locally = True

    def make_remote_side(self, folder):
        return MemorySide()

    def make_tier(self, remote_side):
        return open_tier(remote_side)
