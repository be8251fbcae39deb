"""A store that failed half-way is found and served.

LMCache: the entry stays in the index when writing fails; two writers of one key share a staging
name. Dynamo KVBM: any error of a transfer was counted as loaded, and another request's KV came
back with a 200. Mooncake: the keys exist, the value is empty.
Threads: https://github.com/LMCache/LMCache/issues/4991
https://github.com/ai-dynamo/dynamo/issues/15079
https://github.com/kvcache-ai/Mooncake/issues/3465
"""

import pytest

from holdfast.errors import Outcome
from holdfast.testing.faulty import FaultyTier, InjectedFault
from holdfast_bench.campaigns.contexts import Contexts, chain_of

CHAIN = chain_of("a prompt", 4)


@pytest.mark.parametrize("fault", [InjectedFault.GONE_WRITE, InjectedFault.FULL_WRITE])
def test_a_block_whose_write_failed_is_not_found_on_the_tier(open_store, below, fault):
    tier, records = below
    contexts = Contexts(open_store(FaultyTier(tier, 1, {fault: 1.0})), 9_000)
    contexts.save(CHAIN)
    contexts.wait_written()
    contexts.leave_host(CHAIN)
    assert records == {}
    assert contexts.read(CHAIN) == 0
    assert contexts.save(CHAIN) == 4


def test_a_read_that_fails_is_not_a_hit(open_store, below):
    tier, _ = below
    contexts = Contexts(open_store(FaultyTier(tier, 1, {InjectedFault.GONE_READ: 1.0})), 9_000)
    contexts.save(CHAIN)
    contexts.wait_written()
    contexts.leave_host(CHAIN)
    fetched = contexts.store.fetch(contexts.namespace, CHAIN, 5.0)
    assert (fetched.places, fetched.outcome) == ([], Outcome.GONE)


def test_slots_that_are_not_committed_belong_to_no_key(contexts):
    store, namespace = contexts.store, contexts.namespace
    reserved = store.reserve(namespace, CHAIN, namespace.fingerprint, 0)
    assert store.cover(namespace, CHAIN).blocks == 0
    store.abort(reserved.ticket)
    assert store.commit(reserved.ticket) == 0
    assert contexts.read(CHAIN) == 0


def test_two_writers_of_one_key_use_separate_slots(contexts):
    store, namespace = contexts.store, contexts.namespace
    first = store.reserve(namespace, CHAIN, namespace.fingerprint, 0)
    second = store.reserve(namespace, CHAIN, namespace.fingerprint, 0)
    assert set(first.places).isdisjoint(second.places)
    contexts.save(CHAIN)
    store.abort(first.ticket)  # one of them gives up, with nothing but rubbish in its slots
    assert contexts.read(CHAIN) == 4
    store.abort(second.ticket)
    assert contexts.read(CHAIN) == 4
