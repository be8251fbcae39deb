"""Threads by turns: nobody waits behind a flood, and futures behave as everywhere."""

import threading
import time
from collections import Counter
from concurrent.futures import wait

import pytest

from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.fairness.fair_threads import FairThreads
from holdfast.fairness.work_slots import SEEN_S

FLOOD, VICTIM = b"flood", b"victim"


@pytest.fixture
def pools():
    made, gate = [], threading.Event()

    def make(threads, spare):
        made.append(FairThreads(threads, spare, "test", lambda: 0.0))
        return made[-1], gate

    yield make
    gate.set()
    for pool in made:
        pool.shutdown()


def test_submitted_work_returns_its_result_or_error(pools):
    pool, _ = pools(2, 0)
    futures = [pool.submit(WorkItem(FLOOD), lambda i=i: i * i) for i in range(20)]
    assert [future.result(60) for future in futures] == [i * i for i in range(20)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(WorkItem(FLOOD), lambda: 1 // 0).result(60)


def test_waiting_work_gets_new_threads_when_running_work_is_given_up(pools):
    pool, gate = pools(2, 0)
    began = threading.Semaphore(0)

    def hang():
        began.release()
        return gate.wait(600)

    hung = [pool.submit(WorkItem(FLOOD), hang) for _ in range(2)]
    assert all(began.acquire(timeout=60) for _ in hung)
    waiting = [pool.submit(WorkItem(FLOOD), lambda: "served") for _ in range(5)]
    pool.give_up_running()
    assert [future.result(60) for future in waiting] == ["served"] * 5
    assert pool.submit(WorkItem(VICTIM), lambda: "served").result(60) == "served"
    assert not any(future.done() for future in hung)
    gate.set()
    assert [future.result(60) for future in hung] == [True] * 2


def test_an_error_of_work_that_no_caller_awaits_is_logged(pools, caplog):
    pool, _ = pools(1, 0)
    pool.run_unawaited(WorkItem(FLOOD), lambda: 1 // 0)
    pool.submit(WorkItem(FLOOD), int).result(60)
    assert "ZeroDivisionError" in caplog.text


def test_one_domain_never_occupies_the_spare_threads(pools):
    pool, gate = pools(2, 1)
    for _ in range(50):
        pool.submit(WorkItem(FLOOD), lambda: gate.wait(60))
    assert pool.submit(WorkItem(VICTIM), lambda: "at once").result(60) == "at once"


def test_a_domain_that_arrives_behind_a_flood_is_served_next(pools):
    pool, gate = pools(1, 0)
    order = []
    first = pool.submit(WorkItem(FLOOD), lambda: gate.wait(60))
    flood = [pool.submit(WorkItem(FLOOD), lambda: order.append("flood")) for _ in range(50)]
    late = pool.submit(WorkItem(VICTIM), lambda: order.append("victim"))
    gate.set()
    wait([first, late, *flood], 60)
    assert order.index("victim") <= 1


def test_a_prefetch_raised_to_demand_is_served_in_fair_order(pools):
    pool, gate = pools(1, 0)
    order, later = [], WorkItem(VICTIM, priority=Priority.PREFETCH)
    first = pool.submit(WorkItem(FLOOD), lambda: gate.wait(60))
    ahead = [pool.submit(later, lambda n=n: order.append(n)) for n in range(3)]
    flood = [pool.submit(WorkItem(FLOOD), lambda: order.append("flood")) for _ in range(10)]
    pool.raise_priority(VICTIM, ahead[2])
    pool.raise_priority(FLOOD, first)  # has begun: nothing to do
    gate.set()
    wait([first, *ahead, *flood], 60)
    assert order.index(2) <= 1
    assert sorted(map(str, order)) == ["0", "1", "2", *["flood"] * 10]


def test_prefetch_work_runs_after_demand_work(pools):
    pool, gate = pools(1, 0)
    order = []
    first = pool.submit(WorkItem(VICTIM, priority=Priority.PREFETCH), lambda: gate.wait(60))
    work = [
        pool.submit(
            WorkItem(VICTIM, priority=priority), lambda priority=priority: order.append(priority)
        )
        for priority in [Priority.PREFETCH] * 20 + [Priority.DEMAND] * 10
    ]
    gate.set()
    wait([first, *work], 60)
    assert order[:10].count(Priority.DEMAND) >= 9
    assert len(order) == 30


def test_queued_work_can_be_cancelled_and_running_work_cannot(pools):
    pool, gate = pools(1, 0)
    begun = threading.Event()
    running = pool.submit(WorkItem(FLOOD), lambda: (begun.set(), gate.wait(60)))
    done = []
    waiting = pool.submit(WorkItem(FLOOD), lambda: done.append(1))
    assert begun.wait(60)
    assert waiting.cancel()
    assert not running.cancel()
    gate.set()
    pool.submit(WorkItem(FLOOD), lambda: None).result(60)
    assert done == []


def test_a_domain_with_credit_has_all_its_work_done_first(pools):
    pool, gate = pools(1, 0)
    order, flooded = [], WorkItem(FLOOD, cost=1.0)
    for _ in range(40):
        pool.submit(flooded, lambda: None).result(60)
    first = pool.submit(flooded, lambda: gate.wait(60))
    flood = [pool.submit(flooded, lambda: order.append("flood")) for _ in range(40)]
    assert pool.credit(WorkItem(VICTIM)) >= 30
    assert pool.credit(flooded) == 0
    assert pool.credit(WorkItem(VICTIM, priority=Priority.PREFETCH)) == 0
    late = [pool.submit(WorkItem(VICTIM), lambda: order.append("victim")) for _ in range(15)]
    gate.set()
    wait([first, *flood, *late], 60)
    assert order[:15].count("victim") >= 14


def test_several_light_domains_get_spare_threads_and_none_gets_all_of_them(pools):
    pool, gate = pools(4, 4)
    started = []
    for domain, begun in ((FLOOD, 4), (b"one", 6), (b"two", 7), (b"three", 8)):
        for _ in range(10):
            pool.submit(
                WorkItem(domain), lambda domain=domain: (started.append(domain), gate.wait(60))
            )
        deadline = time.monotonic() + 60
        while len(started) < begun:
            assert time.monotonic() < deadline, started
            time.sleep(0.001)
    assert Counter(started) == {FLOOD: 4, b"one": 2, b"two": 1, b"three": 1}


def test_a_pool_is_shared_while_another_domain_had_work_lately():
    now = [0.0]
    pool = FairThreads(1, 0, "test", lambda: now[0])
    pool.submit(WorkItem(FLOOD), lambda: None).result(60)
    assert not pool.shared(FLOOD)
    assert pool.shared(VICTIM)
    pool.submit(WorkItem(VICTIM), lambda: None).result(60)
    assert pool.shared(FLOOD)
    now[0] += SEEN_S
    assert not pool.shared(FLOOD)
    pool.shutdown()


def test_cancelled_work_does_not_count_in_the_fair_order(pools):
    pool, gate = pools(1, 0)
    order, begun = [], threading.Event()
    first = pool.submit(WorkItem(FLOOD), lambda: (begun.set(), gate.wait(60)))
    assert begun.wait(60)
    for _ in range(20):
        assert pool.submit(WorkItem(VICTIM), lambda: None).cancel()
    both = [
        pool.submit(WorkItem(domain), lambda domain=domain: order.append(domain))
        for domain in (FLOOD, VICTIM) * 10
    ]
    gate.set()
    wait([first, *both], 60)
    assert 4 <= order[:10].count(VICTIM) <= 6


def test_a_shutdown_waits_for_all_work_or_cancels_queued_work():
    pool, done = FairThreads(2, 1, "test"), []
    for _ in range(20):
        pool.submit(WorkItem(FLOOD), lambda: done.append(1))
    pool.shutdown()
    assert len(done) == 20
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(WorkItem(FLOOD), lambda: None)
    dropping, gate, begun = FairThreads(1, 0, "test"), threading.Event(), threading.Event()
    dropping.submit(WorkItem(FLOOD), lambda: (begun.set(), gate.wait(60)))
    futures = [dropping.submit(WorkItem(VICTIM), lambda: None) for _ in range(5)]
    assert begun.wait(60)

    def let_go(_):
        if all(future.cancelled() for future in futures):
            gate.set()

    for future in futures:
        future.add_done_callback(let_go)
    dropping.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in futures)
    assert gate.is_set(), "before what is under way was waited for"


@pytest.fixture
def threads_to_have(monkeypatch):
    """Call with how many more threads the system has for this process."""
    start, left = threading.Thread.start, [0]

    def begin(thread):
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    def limit(count):
        left[0] = count
        monkeypatch.setattr(threading.Thread, "start", begin)

    return limit


def test_existing_threads_do_all_work_if_no_thread_can_be_started(threads_to_have):
    pool = FairThreads(4, 0, "test")
    threads_to_have(1)
    futures = [pool.submit(WorkItem(FLOOD), lambda i=i: i) for i in range(20)]
    assert [future.result(60) for future in futures] == list(range(20))
    pool.shutdown()


def test_work_refused_for_lack_of_a_thread_is_never_started(threads_to_have):
    """Whoever was told that it is not done has given its memory to others."""
    pool, done = FairThreads(2, 0, "test"), []
    threads_to_have(0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pool.submit(WorkItem(FLOOD), lambda: done.append("refused"))
    threads_to_have(1)
    pool.submit(WorkItem(FLOOD), lambda: done.append("taken")).result(60)
    pool.shutdown()
    assert done == ["taken"]


def test_many_domains_from_many_threads_all_get_done():
    pool, total = FairThreads(3, 1, "test"), []

    def submit(domain):
        futures = [
            pool.submit(WorkItem(bytes([domain])), lambda: total.append(1)) for _ in range(200)
        ]
        wait(futures, 60)

    threads = [threading.Thread(target=submit, args=(domain,)) for domain in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    pool.shutdown()
    assert len(total) == 1_200
