"""The counters of a shared tier add up, from many threads at once."""

from concurrent.futures import ThreadPoolExecutor

from holdfast.tiers.base import TierUsage
from holdfast.tiers.transfer_counts import TransferCounts


def test_counts_added_by_many_threads_add_up():
    counts = TransferCounts()
    with ThreadPoolExecutor(4) as threads:
        for _ in range(100):
            threads.submit(counts.add, read_bytes=3, failures=1)
            threads.submit(counts.add, written_bytes=5)
    assert counts.usage() == TierUsage(0, 0, 0, 300, 500, 100)
