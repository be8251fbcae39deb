"""Threads that are all there, or said to be missing, before anything begins."""

import threading

import pytest

from holdfast.errors import ConfigError
from holdfast.workers import workers


def test_threads_that_can_not_be_had_are_said_before_anything_begins(monkeypatch):
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


def test_a_thread_that_can_not_begin_is_said_and_nobody_waits_for_it():
    def begin():
        raise PermissionError(1, "Operation not permitted")

    with pytest.raises(ConfigError, match=r"never-begins: a thread could not begin \(Permission"):
        workers(3, "never-begins", begin)
    assert not [each for each in threading.enumerate() if each.name.startswith("never-begins")]
