"""Many misses, one reading."""

import threading

import pytest

from holdfast.tiers.pool.singleflight import SingleFlight


class Backend:
    """Reads slowly: only when all who are expected wait."""

    def __init__(self, flights, expected, error=None):
        self.flights, self.expected, self.error = flights, expected, error
        self.reads = 0
        self.pause = threading.Event()

    def read(self):
        self.reads += 1
        while self.flights.waiting("segment") < self.expected:
            self.pause.wait(0.001)
        if self.error:
            raise self.error
        return b"bytes"


def run_all(count, ask):
    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_thousand_concurrent_misses_are_one_read():
    flights = SingleFlight()
    backend = Backend(flights, 999)
    got = []
    run_all(1_000, lambda: got.append(flights.share("segment", backend.read, 60, b"late")))
    assert got == [b"bytes"] * 1_000
    assert (backend.reads, flights.led, flights.shared) == (1, 1, 999)
    assert flights.waiting("segment") == 0


def test_an_error_reaches_all_who_share_and_none_after():
    flights = SingleFlight()
    backend = Backend(flights, 9, OSError("disk on fire"))
    got = []

    def ask():
        try:
            flights.share("segment", backend.read, 60, b"late")
        except OSError as error:
            got.append(str(error))

    run_all(10, ask)
    assert got == ["disk on fire"] * 10
    assert backend.reads == 1
    assert flights.share("segment", lambda: b"bytes", 60, b"late") == b"bytes"


def test_who_waits_too_long_is_late_and_the_reading_goes_on():
    flights = SingleFlight()
    may_land = threading.Event()
    got = []
    leader = threading.Thread(
        target=lambda: got.append(
            flights.share("segment", lambda: may_land.wait(60) and b"bytes", 60, b"late")
        )
    )
    leader.start()
    while not flights.led:
        may_land.wait(0.001)
    assert flights.share("segment", lambda: b"another", 0.01, b"late") == b"late"
    may_land.set()
    leader.join()
    assert got == [b"bytes"]


def test_other_names_are_other_readings():
    flights = SingleFlight()
    inner = flights.share("a", lambda: flights.share("b", lambda: 2, 1, 0) + 1, 1, 0)
    assert inner == 3
    assert flights.led == 2


def test_an_interrupted_reading_makes_the_others_late():
    flights = SingleFlight()
    got = []

    def read():
        while flights.waiting("segment") < 1:
            pause.wait(0.001)
        raise KeyboardInterrupt

    pause = threading.Event()

    def follow():
        while not flights.led:
            pause.wait(0.001)
        got.append(flights.share("segment", lambda: b"another", 60, b"late"))

    follower = threading.Thread(target=follow)
    follower.start()
    with pytest.raises(KeyboardInterrupt):
        flights.share("segment", read, 60, b"late")
    follower.join()
    assert got == [b"late"]
