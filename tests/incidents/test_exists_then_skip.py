"""A damaged record that "exists", so that nobody ever writes it again.

Seen where a store asks whether a file is there before it writes, and not what is in it: SGLang's
`HiCacheFile` (read in 0.5.23), vLLM's file system tier (0.32), where saving a damaged block again
did not mend it. Every request of that prefix recomputes, or worse, for ever.
Thread, of the same kind: https://github.com/LMCache/LMCache/issues/4991
"""

from holdfast.testing.store_view import StoreView
from holdfast_bench.campaigns.contexts import Contexts, chain_of
from holdfast_bench.campaigns.loopback import local_and_remote

CHAIN = chain_of("a prompt", 4)


def test_the_next_save_replaces_a_damaged_record_on_a_local_tier(open_store, below):
    tier, records = below
    contexts = Contexts(open_store(tier), 9_000)
    contexts.save(CHAIN)
    contexts.wait_written()
    contexts.leave_host(CHAIN)
    place = sorted(records)[2]
    records[place] = records[place][:500] + b"\0" * 600 + records[place][1100:]
    assert contexts.read(CHAIN) == 2
    assert contexts.save(CHAIN) == 1
    contexts.wait_written()
    contexts.leave_host(CHAIN)
    assert contexts.read(CHAIN) == 4


def test_the_next_save_replaces_a_damaged_record_at_a_shared_target():
    with local_and_remote(9_000) as both:
        both.local.save(CHAIN)
        both.local.wait_written()
        both.local.leave_host(CHAIN)
        StoreView(both.remote).record(both.local.namespace, CHAIN[1])[700] ^= 1
        assert both.local.read(CHAIN) == 1
        assert both.remote.held(both.local.namespace, CHAIN) == b"\1\0\1\1"
        both.local.save(CHAIN)
        both.local.wait_written()
        both.local.leave_host(CHAIN)
        assert both.local.read(CHAIN) == 4
