"""The arenas' memory comes in by itself, ahead of use, whatever a call to the kernel says."""

import itertools
import threading
from types import SimpleNamespace

import pytest

from holdfast.store import prefault as module
from holdfast.store.prefault import SCARCE_CHUNKS, ArenaPrefault
from holdfast.tiers.chunks import AHEAD_CHUNKS


class Host:
    """A host tier that has so many chunks to bring in, and fails once."""

    has_locks = False

    def __init__(self, chunks):
        self.left = chunks
        self.failed = False
        self.done = threading.Event()

    def reclaim(self):
        return 0

    def prefault(self, most):
        assert most == AHEAD_CHUNKS
        if not self.failed:
            self.failed = True
            raise OSError(12, "Cannot allocate memory")
        self.left = max(0, self.left - 1)
        if not self.left:
            self.done.set()
        return self.left > 0


class States:
    def __init__(self, *hosts):
        self.all_hosts = lambda: list(hosts)
        self.leases = SimpleNamespace(issued=0, reservations=0)


def test_every_arena_is_prefaulted_even_if_some_calls_fail(caplog):
    hosts = Host(3), Host(5)
    prefault = ArenaPrefault(States(*hosts))
    prefault.start()
    assert all(host.done.wait(60) for host in hosts)
    prefault.close()
    assert [host.left for host in hosts] == [0, 0]
    assert "cannot be faulted in ahead" in caplog.text


def test_a_prefault_that_was_never_started_can_be_closed():
    ArenaPrefault(States()).close()


@pytest.fixture
def looked(monkeypatch):
    """Call with what a store does at each look; returns how much memory was to be ahead at each."""
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(module, "_REST_S", 0.0)

    def run(*activities):
        asked, over = [], threading.Event()

        class Asked:
            has_locks = False

            def reclaim(self):
                return 0

            def prefault(self, most):
                asked.append(most)
                if len(asked) == len(activities):
                    over.set()
                table.leases.issued, table.leases.reservations = activities[
                    min(len(asked), len(activities) - 1)
                ]
                return False

        table = States(Asked())
        table.leases.issued, table.leases.reservations = activities[0]
        made = ArenaPrefault(table)
        made.start()
        assert over.wait(60)
        made.close()
        return asked[: len(activities)]

    return run


def test_memory_is_prefaulted_during_a_save_only_if_it_is_scarce(looked):
    """A ticket is open from the beginning of a step to its end; then the next one's."""
    none, one = {}, {1: "ticket"}
    steps = (0, none), (1, one), (1, one), (1, none), (2, one), (2, none)
    assert looked(*steps) == [AHEAD_CHUNKS, *[SCARCE_CHUNKS] * 5]
    rest = (0, none), (1, one), (1, none), (1, none), (1, none)
    assert looked(*rest) == [AHEAD_CHUNKS, *[SCARCE_CHUNKS] * 2, *[AHEAD_CHUNKS] * 2]


def test_memory_is_prefaulted_between_successive_fetches_only_if_it_is_scarce(looked):
    leases = (0, {}), (1, {}), (2, {}), (2, {})
    assert looked(*leases) == [AHEAD_CHUNKS, SCARCE_CHUNKS, SCARCE_CHUNKS, AHEAD_CHUNKS]


def test_memory_is_prefaulted_soon_after_a_fetch_only_if_it_is_scarce(looked, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(module, "_REST_S", 3.0)
    leases = (0, {}), (1, {}), (1, {}), (1, {}), (1, {})
    assert looked(*leases) == [AHEAD_CHUNKS, *[SCARCE_CHUNKS] * 3, AHEAD_CHUNKS]
