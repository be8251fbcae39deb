"""A chunk that is read while it is being written: half of it is old, and the answer is wrong.

Thread: https://github.com/LMCache/LMCache/issues/207
"""

import threading

from holdfast_bench.campaigns.contexts import Contexts, chain_of

ROUNDS = 60


def test_a_block_is_seen_whole_or_not_at_all(open_store, below):
    tier, _ = below
    contexts = Contexts(open_store(tier), 40_000)
    landed, over, wrong = [], threading.Event(), []

    def read():
        try:
            while not over.is_set():
                landed.extend(contexts.read(chain_of(f"round {n}", 4)) for n in range(ROUNDS))
        except AssertionError as error:
            wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(ROUNDS):
        contexts.save(chain_of(f"round {number}", 4))
        if number % 7 == 0:
            contexts.leave_host(chain_of(f"round {number}", 4))
    over.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    contexts.wait_written()
    assert contexts.read(chain_of("round 1", 4)) == 4
