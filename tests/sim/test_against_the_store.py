"""A replay and a real store on a manual clock hit equally many blocks of a shipped trace."""

import pytest

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.policy.choice import POLICIES
from holdfast.sim.replay import replay
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store

RECORD_BYTES = 4096
PAYLOAD_BYTES = RECORD_BYTES - HEADER_BYTES - TAG_BYTES
SECRET = b"s" * 32
REQUESTS = 300
"""Of each trace: a real store packs and hashes every block."""


class ReplayedStore:
    """A store with a host tier of so many blocks, through which a trace is replayed."""

    def __init__(self, blocks, policy):
        self.clock = ManualClock()
        options = StoreOptions(clock=self.clock, make_eviction=policy)
        self.store = Store(blocks * RECORD_BYTES, [], {"default": SECRET}, options)
        _, domain = self.store.domain("default")
        self.namespace = Namespace(b"f" * 16, domain, PAYLOAD_BYTES, 16)
        self.store.start()

    def serve(self, ids, time_s):
        """Fetch the longest held prefix, then save the rest while it is leased."""
        self.clock.advance(time_s - self.clock.now())
        store, namespace = self.store, self.namespace
        keys = [int(number).to_bytes(16, "big") for number in ids]
        fetched = store.fetch(namespace, keys, 60.0)
        held = len(fetched.places)
        if held < len(keys):
            parent = keys[held - 1] if held else namespace.fingerprint
            reserved = store.reserve(namespace, keys[held:], parent, held)
            store.commit(reserved.ticket)
        store.release(fetched.lease)
        return held

    def held(self):
        """How many blocks are held now."""
        with self.store.table.lock:
            return len(self.store.table.index)


def first(trace, requests):
    """The first requests of a trace."""
    return trace._replace(
        time_s=trace.time_s[:requests],
        input_tokens=trace.input_tokens[:requests],
        output_tokens=trace.output_tokens[:requests],
        session=trace.session[:requests],
        think_s=trace.think_s[:requests],
        starts=trace.starts[: requests + 1],
        ids=trace.ids[: trace.starts[requests]],
    )


@pytest.mark.parametrize("policy", ["leaf_lru", "cost_aware"])
@pytest.mark.parametrize("blocks", [32, 48, 80])
def test_a_replay_hits_what_a_store_hits(shipped, policy, blocks, monkeypatch):
    # A store frees some slots ahead of need, from time to time; here only when it needs them.
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 3_600.0)
    trace = first(shipped("taubench_gpt4o_airline_blk256B.jsonl.gz"), REQUESTS)
    one = ReplayedStore(blocks, POLICIES[policy])
    try:
        hits = [
            one.serve(trace.chain(request), float(trace.time_s[request]))
            for request in range(trace.requests)
        ]
        capacity = one.held()  # memory is cut into slots, and the rest of it holds no block
    finally:
        one.store.close()
    assert 0.8 * blocks <= capacity <= blocks
    for requests in (REQUESTS // 3, 2 * REQUESTS // 3, REQUESTS):
        found = replay(first(trace, requests), capacity, POLICIES[policy](), run_blocks=1)
        assert found.hit_blocks == sum(hits[:requests]), requests
    less = replay(trace, capacity - 2, POLICIES[policy](), run_blocks=1)
    assert less.hit_blocks < found.hit_blocks, "the trace does not tell stores of other sizes"
