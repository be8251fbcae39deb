"""What a registered target announces, and when."""

import asyncio
import threading

from holdfast.membership.members import MemberState
from holdfast.node.registration import until_drained


class Recovery:
    def __init__(self):
        self.done = threading.Event()

    def wait(self, timeout_s):
        return self.done.wait(timeout_s)


class Store:
    def __init__(self):
        self.recovery = Recovery()


class Entry:
    def __init__(self):
        self.said = []
        self.news = asyncio.Event()

    def announce(self, state):
        self.said.append(state)
        self.news.set()

    async def next(self):
        await asyncio.wait_for(self.news.wait(), 10)
        self.news.clear()


def run(scenario, drain_s=600.0):
    async def main():
        store, entry, over = Store(), Entry(), asyncio.Event()
        draining = until_drained(over, store, entry, drain_s)
        ended = asyncio.get_running_loop().create_task(draining)
        await scenario(store, entry, over, ended)
        await asyncio.wait_for(ended, 10)
        return entry.said

    return asyncio.run(main())


def test_a_target_serves_after_recovery_and_drains_when_stopped():
    async def scenario(store, entry, over, ended):
        store.recovery.done.set()
        await entry.next()
        over.set()

    assert run(scenario, drain_s=0.01) == [MemberState.SERVING, MemberState.DRAINING]


def test_a_target_stopped_during_recovery_never_announces_that_it_serves():
    async def scenario(store, entry, over, ended):
        over.set()
        await entry.next()
        store.recovery.done.set()

    assert run(scenario, drain_s=0.5) == [MemberState.DRAINING]


def test_a_draining_target_keeps_running_until_a_second_stop():
    async def scenario(store, entry, over, ended):
        over.set()
        await entry.next()
        assert not ended.done()
        over.set()

    assert run(scenario) == [MemberState.DRAINING]
