"""A forked child has a closed copy of a store: it serves nothing and holds no lock."""

import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings

import numpy as np
import pytest

import holdfast
from holdfast.errors import Outcome, StoreClosedError
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, blocks_for, serves, tokens_for

# Python 3.12 and later warn of a fork beside other threads; a store always has threads.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
FORK = multiprocessing.get_context("fork")


def in_child(work) -> int:
    """Run `work` in a forked child; return its process id. It ends with 0 unless `work` raises."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001  # the child must not go on as a second test run
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended_well(pid: int) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


@pytest.fixture
def store(tmp_path):
    with holdfast.open(host="16 MiB", disk="32 MiB", path=str(tmp_path / "tier")) as opened:
        yield opened


def test_a_forked_child_is_refused_because_the_store_belongs_to_its_parent(store) -> None:
    session, parent = store.session(FINGERPRINT), os.getpid()
    serves(session, 1)

    def child() -> None:
        found = np.full_like(blocks_for(1), 7)
        landed = session.fetch(tokens_for(1), into=found)
        assert (landed.blocks, landed.outcome) == (0, Outcome.GONE)
        assert f"opened by process {parent}" in landed.reason
        assert "after the fork" in landed.reason
        assert (found == 7).all()
        with pytest.raises(StoreClosedError, match=f"opened by process {parent}"):
            session.save(tokens_for(2), blocks_for(2))
        for method in (store.status, store.listing, store.domains):
            with pytest.raises(StoreClosedError):
                method()
        store.close()

    assert ended_well(in_child(child))
    serves(session, 1)
    assert session.cover(tokens_for(2)) == 0


def test_saves_in_forked_children_do_not_change_the_parents_store(store) -> None:
    session = store.session(FINGERPRINT)
    serves(session, 1)

    def child() -> None:
        view = store.arena(session.namespace.domain).view
        view[:4096] = bytes(range(256)) * 16  # a view from before the fork is of private memory
        for seed in range(2, 20):
            with pytest.raises(StoreClosedError):
                session.save(tokens_for(seed), blocks_for(seed))

    children = [in_child(child) for _ in range(3)]
    for seed in range(20, 60):
        serves(session, seed)
    assert all(map(ended_well, children))
    for seed in (1, *range(20, 60)):
        found = np.zeros_like(blocks_for(seed))
        landed = session.fetch(tokens_for(seed), into=found)
        assert landed.blocks == BLOCKS
        assert (found == blocks_for(seed)).all()


def test_a_child_forked_while_threads_use_the_store_does_not_hang(store) -> None:
    session, over = store.session(FINGERPRINT), threading.Event()

    def use(seed: int) -> None:
        while not over.is_set():
            serves(session, seed)

    def child() -> None:
        assert session.fetch(tokens_for(1), into=blocks_for(1)).outcome is Outcome.GONE
        assert not store.release(1)
        store.abort(1)
        store.close()

    users = [threading.Thread(target=use, args=(seed,)) for seed in (1, 2, 3)]
    for user in users:
        user.start()
    try:
        assert all(ended_well(in_child(child)) for _ in range(25))
    finally:
        over.set()
        for user in users:
            user.join()


def test_forked_multiprocessing_workers_are_refused_with_the_reason(store) -> None:
    session = store.session(FINGERPRINT)
    serves(session, 1)

    def work(results, seed: int) -> None:
        found = np.full_like(blocks_for(1), 7)
        landed = session.fetch(tokens_for(1), into=found)
        try:
            session.save(tokens_for(seed), blocks_for(seed))
        except StoreClosedError as error:
            results.put((landed.outcome, bool((found == 7).all()), str(error)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        workers = [context.Process(target=work, args=(results, seed)) for seed in (2, 3)]
        for worker in workers:
            worker.start()
    for _ in workers:
        outcome, untouched, error = results.get()
        assert (outcome, untouched) == (Outcome.GONE, True)
        assert f"opened by process {os.getpid()}" in error
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    serves(session, 1)
    assert session.cover(tokens_for(2)) == session.cover(tokens_for(3)) == 0


def test_a_child_that_outlives_its_parent_does_not_keep_the_folder(tmp_path) -> None:
    folder, (ready, tell) = str(tmp_path / "tier"), os.pipe()
    grandchild_ends, keep = os.pipe()

    def parent() -> None:
        store = holdfast.open(host="16 MiB", disk="32 MiB", path=folder)
        store.session(FINGERPRINT).save(tokens_for(1), blocks_for(1))
        if not os.fork():
            os.close(keep)
            os.write(tell, b"1")
            os.read(grandchild_ends, 1)  # until the test ends
            os._exit(0)
        os._exit(0)  # without closing the store

    assert ended_well(in_child(parent))
    assert os.read(ready, 1) == b"1"
    with holdfast.open(host="16 MiB", disk="32 MiB", path=folder) as store:
        serves(store.session(FINGERPRINT), 2)
    os.close(keep)


def test_a_child_that_leaves_the_with_block_writes_nothing(tmp_path) -> None:
    folder = tmp_path / "tier"
    with holdfast.open(host="16 MiB", disk="32 MiB", path=str(folder)) as store:
        session = store.session(FINGERPRINT)
        serves(session, 1)

        def child() -> None:
            import atexit

            store.__exit__()
            atexit._run_exitfuncs()

        assert ended_well(in_child(child))
        serves(session, 2)
    with holdfast.open(host="16 MiB", disk="32 MiB", path=str(folder)) as store:
        store.recovery.wait(60)
        assert store.session(FINGERPRINT).cover(tokens_for(1)) == 32 * BLOCKS


inherited = []
"""In a worker of a pool: the session that its parent opened."""


def use_inherited(seed: int) -> tuple[int, str, str, str, bool]:
    """Fetch and save in a worker; return what it was told, and whether its memory is as it was."""
    [session] = inherited
    found = np.full_like(blocks_for(seed), 7)
    landed = session.fetch(tokens_for(seed), into=found)
    try:
        session.save(tokens_for(1_000 + seed), blocks_for(1_000 + seed))
        refused = ""
    except StoreClosedError as error:
        refused = str(error)
    return landed.blocks, landed.outcome, landed.reason, refused, bool((found == 7).all())


def test_forked_pool_workers_are_refused_and_the_parents_store_still_serves(store) -> None:
    session, parent = store.session(FINGERPRINT), os.getpid()
    for seed in range(20):
        serves(session, seed)
    with FORK.Pool(3, initializer=inherited.append, initargs=(session,)) as pool:
        answers = pool.map_async(use_inherited, range(200), chunksize=4)
        beside = range(20, 60)
        for seed in beside:
            serves(session, seed)
        for blocks, outcome, reason, refused, untouched in answers.get(60):
            assert (blocks, outcome) == (0, Outcome.GONE)
            for words in (reason, refused):
                assert f"opened by process {parent}" in words
                assert "open a store in this process, after the fork" in words
            assert untouched
    assert session.cover(tokens_for(1_001)) == 0
    for seed in (*range(20), *beside):
        found = np.zeros_like(blocks_for(seed))
        assert session.fetch(tokens_for(seed), into=found).blocks == BLOCKS
        assert (found == blocks_for(seed)).all()


def test_a_closed_stores_folder_is_unlocked_while_forked_processes_run(tmp_path) -> None:
    folder, over = str(tmp_path / "tier"), FORK.Event()
    with holdfast.open(host="16 MiB", disk="32 MiB", path=folder) as store:
        serves(store.session(FINGERPRINT), 1)
        children = [FORK.Process(target=over.wait, args=(60,)) for _ in range(2)]
        for child in children:
            child.start()
    try:
        with holdfast.open(host="16 MiB", disk="32 MiB", path=folder) as store:
            assert all(child.is_alive() for child in children)
            assert store.recovery.wait(60)
            serves(store.session(FINGERPRINT), 1)
    finally:
        over.set()
        for child in children:
            child.join(60)
    assert [child.exitcode for child in children] == [0, 0]


def test_a_process_forked_by_multiprocessing_can_open_its_own_store(store, tmp_path) -> None:
    session = store.session(FINGERPRINT)
    serves(session, 1)

    def child() -> None:
        with holdfast.open(host="16 MiB", disk="32 MiB", path=str(tmp_path / "other")) as own:
            serves(own.session(FINGERPRINT), 2)
        assert session.fetch(tokens_for(1), into=blocks_for(1)).outcome is Outcome.GONE

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    serves(session, 1)
