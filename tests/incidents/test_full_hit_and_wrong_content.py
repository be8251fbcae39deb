"""Every block is reported as a hit, every length is right, and the content is another's.

LMCache: sessions coming back from disk were answered with other requests' content, without a line
in the log. LMCache-Ascend: the hit was counted, the data never copied. DingoCache: 100 % hits,
equal byte counts, contents that change from run to run.
Threads: https://github.com/LMCache/LMCache/issues/4385
https://github.com/LMCache/LMCache-Ascend/pull/270
DingoCache #231
"""

from holdfast.errors import Outcome
from holdfast_bench.campaigns.contexts import Contexts, chain_of

MINE, OTHER = chain_of("my prompt", 4), chain_of("another prompt", 4)


def test_two_swapped_records_are_both_misses(open_store, below):
    tier, records = below
    contexts = Contexts(open_store(tier), 9_000)
    for chain in (MINE, OTHER):
        contexts.save(chain)
        contexts.wait_written()
        contexts.leave_host(chain)
    mine, other = sorted(records)[1], sorted(records)[5]
    records[mine], records[other] = records[other], records[mine]
    assert contexts.read(MINE) == 1
    assert contexts.read(OTHER) == 1
    contexts.save(MINE)
    contexts.save(OTHER)
    assert (contexts.read(MINE), contexts.read(OTHER)) == (4, 4)


def test_a_payload_of_another_block_under_the_right_header_is_corrupt(contexts):
    contexts.save(MINE)
    contexts.save(OTHER)
    contexts.record(MINE[2])[128:] = contexts.record(OTHER[2])[128:]
    fetched = contexts.store.fetch(contexts.namespace, MINE, 60.0)
    assert (len(fetched.places), fetched.outcome) == (2, Outcome.CORRUPT)
    assert contexts.store.release(fetched.lease)


def test_a_truncated_record_is_not_completed_with_bytes_of_another(open_store, below):
    tier, records = below
    contexts = Contexts(open_store(tier), 9_000)
    contexts.save(OTHER)  # what the slots held before
    contexts.save(MINE)
    contexts.wait_written()
    contexts.leave_host([*OTHER, *MINE])
    for place in sorted(records):
        records[place] = records[place][:4096]
    assert contexts.read(MINE) == 0
