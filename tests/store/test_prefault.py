"""The arenas' memory comes in by itself, ahead of use, whatever a call to the kernel says."""

import threading

from holdfast.store.prefault import Prefault


class Host:
    """A host tier that has so many chunks to bring in, and fails once."""

    def __init__(self, chunks):
        self.left = chunks
        self.failed = False
        self.done = threading.Event()

    def prefault(self):
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


def test_every_arena_is_brought_in_though_one_fails_now_and_then(caplog):
    hosts = Host(3), Host(5)
    prefault = Prefault(States(*hosts))
    prefault.start()
    assert all(host.done.wait(30) for host in hosts)
    prefault.close()
    assert [host.left for host in hosts] == [0, 0]
    assert "it comes page by page" in caplog.text


def test_what_was_never_started_can_be_closed():
    Prefault(States()).close()
