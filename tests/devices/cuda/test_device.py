"""The device of GPU pages on a simulated driver, whose seed chooses the order of what is queued."""

import contextlib
import os

import pytest
from gpu_machine import CALLS, COUNT, PAYLOAD, SLOT, SLOTS, WIDE, Machine

from holdfast.devices.base import DeviceError, Move
from holdfast.devices.cuda import device as device_module
from holdfast.devices.driver import DriverError
from holdfast.errors import BlockError
from holdfast.testing.simulated_driver import SimulatedDriver

SEEDS = range(8)


@pytest.fixture(params=["locked", "bounced", "partly locked"])
def locking(request):
    def locks_of(machine):
        if request.param == "locked":
            machine.lock_all()
        elif request.param == "partly locked":
            machine.locks.lock(0)
            machine.locks.lock(1)
        return machine.locks

    return locks_of


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No save gives up because this machine is busy."""
    monkeypatch.setattr(device_module, "SAVE_S", 600.0)


@pytest.fixture(autouse=True)
def piece_bytes(monkeypatch):
    """Set the size of a piece: some blocks, or only some layers of one."""

    def set_size(nbytes):
        monkeypatch.setattr(device_module, "PIECE_BYTES", nbytes)

    set_size(4 * PAYLOAD)
    return set_size


@pytest.mark.parametrize("piece", [4 * PAYLOAD, 2 * PAYLOAD, PAYLOAD, 300, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_saved_blocks_come_back_into_other_pages(seed, piece, locking, piece_bytes):
    piece_bytes(piece)
    machine = Machine(seed)
    locks = locking(machine)
    blocks, slots = [[5, 1], [9, 2], [0, 23]], [4, 0, 3]
    before = [machine.block(ids) for ids in blocks]
    assert machine.save(blocks, slots, locks)
    assert [machine.payload(slot) for slot in slots] == before
    into = [[3, 11], [4, 6], [20, 21]]
    others = [page for page in range(COUNT) if page not in {3, 11, 4, 6, 20, 21}]
    kept = machine.wide[:, others].copy(), machine.narrow[:, others].copy()
    padding = machine.wide[:, :, WIDE:].copy()
    moves = [Move(slot * SLOT, ids) for slot, ids in zip(slots, into, strict=True)]
    assert machine.device.scatter(machine.arena, moves, machine.device.mark(), locks).result()
    assert [machine.block(ids) for ids in into] == before
    assert (machine.wide[:, others] == kept[0]).all()
    assert (machine.narrow[:, others] == kept[1]).all()
    assert (machine.wide[:, :, WIDE:] == padding).all()
    assert not machine.driver.faults
    assert not machine.locks.uses
    machine.device.close()


def test_locked_memory_needs_no_thread_and_no_bounce():
    machine = Machine()
    machine.lock_all()
    assert machine.save([[5, 1], [9, 2]], [0, 1], machine.locks)
    moves = [Move(0, [3, 4]), Move(SLOT, [7, 8])]
    assert machine.device.scatter(machine.arena, moves, None, machine.locks).result()
    assert machine.driver.calls["bounce"] == 0
    assert machine.device._saver is None
    assert machine.device.copied_bytes() == (4 * PAYLOAD, 0)
    assert machine.locks.wanted == []


def test_memory_that_was_not_locked_is_asked_for_after_its_copy():
    machine = Machine()
    machine.locks.lock(0)
    assert machine.save([[5, 1], [9, 2]], [0, 5], machine.locks)
    assert machine.locks.wanted == [(5 * SLOT, PAYLOAD)]
    moves = [Move(0, [3, 4]), Move(6 * SLOT, [7, 8])]
    assert machine.device.scatter(machine.arena, moves, None, machine.locks).result()
    assert machine.locks.wanted[1:] == [(6 * SLOT, PAYLOAD)]
    assert machine.device.copied_bytes() == (2 * PAYLOAD, 2 * PAYLOAD)
    machine.device.close()


def test_a_load_can_fill_some_pages_of_a_block():
    machine = Machine()
    machine.lock_all()
    machine.fill(0)
    kept = machine.block([3])
    assert machine.device.scatter(machine.arena, [Move(0, [7], first=1)], None).result()
    content = machine.payload(0)
    assert machine.block([3, 7])[WIDE : 2 * WIDE] == content[WIDE : 2 * WIDE]
    assert machine.block([3]) == kept


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_fills_no_page_before_the_engines_work_at_its_mark(seed):
    machine = Machine(seed)
    machine.lock_all()
    contents = [machine.fill(slot) for slot in range(4)]
    ids = [[0, 1], [2, 3], [4, 5], [6, 7]]
    for _ in range(20):
        machine.overwrite(list(range(8)))  # pages that the engine frees for the load
    mark = machine.device.mark()
    moves = [Move(slot * SLOT, pages) for slot, pages in enumerate(ids)]
    load = machine.device.scatter(machine.arena, moves, mark, machine.locks)
    machine.overwrite([20, 21])
    assert load.result()
    assert [machine.block(pages) for pages in ids] == contents


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_behind_another_one_does_not_disturb_it(seed):
    machine = Machine(seed)
    machine.lock_all()
    contents = [machine.fill(slot) for slot in range(4)]
    first = machine.device.scatter(
        machine.arena, [Move(0, [0, 1]), Move(SLOT, [2, 3])], None, machine.locks
    )
    moves = [Move(3 * SLOT, [6, 7]), Move(2 * SLOT, [4, 5])]
    assert machine.device.scatter(machine.arena, moves, None, machine.locks).result()
    assert first.result()
    assert [machine.block([at, at + 1]) for at in (0, 2, 4, 6)] == contents


@pytest.mark.parametrize("seed", SEEDS)
def test_a_save_has_the_pages_as_they_were_when_it_was_packed(seed):
    machine = Machine(seed)
    machine.lock_all()
    machine.overwrite([5, 1])
    machine.driver.run()
    before = machine.block([5, 1])
    staged = machine.device.stage([[5, 1]])
    staged.pack()
    machine.overwrite([5, 1])
    while not staged.ready():
        pass
    assert staged.copy(machine.arena, [(0, SLOT)], machine.locks).result()
    assert machine.payload(1) == before


def test_nothing_is_copied_to_a_slot_before_its_blocks_have_left_their_pages():
    machine = Machine()
    machine.lock_all()
    staged = machine.device.stage([[5, 1]])
    with pytest.raises(DeviceError, match="before they have left their pages"):
        staged.copy(machine.arena, [(0, 0)], machine.locks)
    for _ in range(50):
        machine.overwrite([2])
    staged.pack()
    before = machine.driver.calls["copy"]
    with pytest.raises(DeviceError, match="before they have left their pages"):
        staged.copy(machine.arena, [(0, 0)], machine.locks)
    assert machine.driver.calls["copy"] == before
    assert not machine.locks.uses


def test_saves_beyond_the_stages_get_no_stage_and_released_ones_are_used_again():
    machine = Machine(step_blocks=2)  # 4 blocks
    first = machine.device.stage([[0, 1], [2, 3], [4, 5]])
    assert machine.device.stage([[6, 7], [8, 9]]) is None
    assert machine.device.stage([[6, 7]] * 5) is None
    second = machine.device.stage([[6, 7]])
    first.release()
    third = machine.device.stage([[8, 9]] * 3)
    assert third is not None
    for each in (second, third):
        each.release()
        each.release()
    assert machine.device.staged_blocks == 0


def test_a_stage_that_was_given_up_is_used_again_only_after_its_kernel_has_ended():
    machine = Machine(step_blocks=1)  # 2 blocks
    for _ in range(200):
        machine.overwrite([2])
    staged = machine.device.stage([[5, 1], [3, 4]])
    staged.pack()
    staged.release()
    assert machine.device.staged_blocks == 2
    assert machine.device.stage([[0, 1]]) is None
    machine.driver.run()
    assert machine.device.staged_blocks == 0
    assert machine.device.stage([[0, 1]]) is not None


def test_less_memory_is_used_for_saves_if_the_gpu_is_short_of_it(monkeypatch, piece_bytes):
    piece_bytes(PAYLOAD)
    sizes = []
    allocate = SimulatedDriver.allocate

    def short(driver, nbytes):
        sizes.append(nbytes)
        if nbytes > 3 * PAYLOAD:
            raise DriverError("allocate: out of memory")
        return allocate(driver, nbytes)

    monkeypatch.setattr(SimulatedDriver, "allocate", short)
    machine = Machine(step_blocks=5)
    assert 10 * PAYLOAD in sizes
    assert machine.device.stage([[0, 1]] * 3) is None
    assert machine.device.stage([[0, 1]] * 2) is not None


@pytest.mark.parametrize(
    ("blocks", "message"),
    [([[1]], "1 pages of a block to save, which has 2"), ([[1, COUNT]], "the engine has 24")],
)
def test_a_save_of_pages_that_do_not_exist_is_refused(blocks, message):
    with pytest.raises(BlockError, match=message):
        Machine().device.stage(blocks)


def test_payloads_outside_the_arena_and_pages_outside_the_engine_are_refused():
    machine = Machine()
    staged = machine.device.stage([[0, 1]])
    staged.pack()
    machine.driver.run()
    for payload in (-1, machine.arena.nbytes - PAYLOAD + 1):
        with pytest.raises(BlockError, match="the arena has"):
            staged.copy(machine.arena, [(0, payload)], machine.locks)
        with pytest.raises(BlockError, match="the arena has"):
            machine.device.scatter(machine.arena, [Move(payload, [0, 1])])
    with pytest.raises(BlockError, match="block 1 of a stage that has 1"):
        staged.copy(machine.arena, [(1, 0)], machine.locks)
    with pytest.raises(BlockError, match="the engine has 24"):
        machine.device.scatter(machine.arena, [Move(0, [0, COUNT])])
    with pytest.raises(BlockError, match="26 pages to fill"):
        machine.device.scatter(machine.arena, [Move(0, [0, 1])] * 13)


def long_load(machine):
    """A load of all pages; return its moves and the content that it brings."""
    moves = [Move(at % SLOTS * SLOT, [2 * at, 2 * at + 1]) for at in range(COUNT // 2)]
    return moves, [machine.payload(move.payload // SLOT) for move in moves]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pieces", [0, 1, 6, 47])
def test_a_load_that_may_not_proceed_copies_no_further_piece(seed, pieces, locking, piece_bytes):
    piece_bytes(1)  # a wide layer or two narrow ones a piece: 4 for each block
    machine = Machine(seed)
    locks = locking(machine)
    for slot in range(SLOTS):
        machine.fill(slot)
    moves, contents = long_load(machine)
    before = [machine.block(move.pages) for move in moves]
    asked = []

    def proceed():
        asked.append(None)
        return len(asked) <= pieces

    assert not machine.device.scatter(machine.arena, moves, None, locks, proceed).result()
    whole, rest = divmod(pieces, 4)
    blocks = [machine.block(move.pages) for move in moves]
    assert blocks[:whole] == contents[:whole]
    untouched = whole + (rest > 0)
    assert blocks[untouched:] == before[untouched:]
    assert len(asked) == pieces + 1
    assert not machine.locks.uses
    # Nothing of it is left that could still write a page.
    assert not any(machine.driver._streams)
    assert machine.device.scatter(machine.arena, moves, None, locks, lambda: True).result()
    assert [machine.block(move.pages) for move in moves] == contents
    assert not machine.driver.faults
    machine.device.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_load_is_queued_at_most_32_pieces_ahead_of_the_gpu(seed, piece_bytes):
    piece_bytes(1)
    machine = Machine(seed)
    machine.lock_all()
    for slot in range(SLOTS):
        machine.fill(slot)
    moves, contents = long_load(machine)
    queued = 0

    def proceed():
        nonlocal queued
        ended = max(0, queued - 32) // 4
        assert [machine.block(move.pages) for move in moves[:ended]] == contents[:ended]
        queued += 1
        return True

    assert machine.device.scatter(machine.arena, moves, None, machine.locks, proceed).result()
    assert queued == 4 * len(moves)
    machine.device.close()


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("call", [*CALLS, "bounce", "engine_stream"])
def test_an_error_of_any_call_loses_blocks_only_and_ends_the_use_of_locks(call, after, lasting):
    machine = Machine(after)
    if call != "bounce":
        machine.lock_all()
    contents = [machine.fill(slot) for slot in range(5, 8)]
    before = [machine.block(ids) for ids in ([0, 1], [2, 3])]
    machine.driver.fail(call, after, lasting=lasting)
    saved = loaded = False
    with contextlib.suppress(DeviceError):
        saved = machine.save([[0, 1], [2, 3]], [0, 1], machine.locks)
    moves = [Move((5 + at) * SLOT, [8 + 2 * at, 9 + 2 * at]) for at in range(3)]
    with contextlib.suppress(DeviceError):
        mark = machine.device.mark()
        loaded = machine.device.scatter(machine.arena, moves, mark, machine.locks).result()
    if saved:
        assert [machine.payload(slot) for slot in (0, 1)] == before
    if loaded:
        assert [machine.block(list(move.pages)) for move in moves] == contents
    assert not machine.locks.uses
    assert not machine.driver.faults
    if not lasting:
        # Nothing is left that could still write a slot or a page which is used for other work.
        machine.driver.mend()
        assert not any(machine.driver._streams[1:])
    machine.device.close()


@pytest.mark.parametrize("call", ["allocate", "allocate_locked", "create_stream", "write"])
def test_a_device_that_cannot_be_set_up_says_why(call, monkeypatch):
    made = []
    create = SimulatedDriver.__init__

    def failing(driver, seed=0):
        create(driver, seed)
        driver.fail(call, lasting=True)
        made.append(driver)

    monkeypatch.setattr(SimulatedDriver, "__init__", failing)
    with pytest.raises(DeviceError, match=call):
        Machine()


def test_a_child_of_the_engines_process_copies_nothing_and_ends():
    machine = Machine()
    machine.lock_all()
    child = os.fork()
    if not child:
        calls = dict(machine.driver.calls)
        code = 1
        try:
            machine.device.stage([[0, 1]])
        except DeviceError as error:
            machine.device.close()
            code = int("child" not in str(error) or calls != dict(machine.driver.calls))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert machine.save([[0, 1]], [0], machine.locks)
    machine.device.close()


def test_an_empty_batch_is_done():
    machine = Machine()
    assert machine.device.scatter(machine.arena, []).result()
