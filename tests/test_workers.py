"""Threads that are all there, or said to be missing, before anything begins."""

import threading
import time

import pytest

from holdfast.errors import ConfigError
from holdfast.workers import parallel, workers


def test_too_many_threads_raise_an_error_before_any_work_begins(monkeypatch):
    started, real = [], threading.Thread.start

    def third_fails(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    with pytest.raises(ConfigError, match="4 threads are more than this process may start"):
        workers(4, "disk-read")
    assert not any(thread.is_alive() for thread in started)


def test_a_thread_that_fails_to_begin_raises_an_error_and_leaves_no_thread():
    def begin():
        raise PermissionError(1, "Operation not permitted")

    with pytest.raises(ConfigError, match=r"never-begins: a thread could not begin \(Permission"):
        workers(3, "never-begins", begin)
    assert not [each for each in threading.enumerate() if each.name.startswith("never-begins")]


def accepting(calls):
    """Return a pool of two threads that refuses work after so many calls."""
    pool = workers(2, "some")
    submit = pool.submit

    def some(*work):
        nonlocal calls
        if not calls:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        calls -= 1
        return submit(*work)

    pool.submit = some
    return pool


@pytest.mark.parametrize("calls", range(5))
def test_work_that_a_pool_refuses_is_done_in_this_thread(calls):
    with accepting(calls) as pool:
        assert parallel(lambda number: 10 * number, range(5), pool) == [0, 10, 20, 30, 40]


def test_parallel_raises_an_error_only_after_running_calls_have_ended():
    begun, ended = threading.Event(), []

    def work(number):
        if number == 0:
            assert begun.wait(60)
            raise ZeroDivisionError
        begun.set()
        time.sleep(0.05)
        ended.append(number)

    with accepting(1) as pool:
        with pytest.raises(ZeroDivisionError):
            parallel(work, range(3), pool)
        assert ended == [1]
