"""The device of GPU pages on a simulated driver, whose seed chooses the order of what is queued."""

import contextlib
import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.devices.base import DeviceError, LayerPages, Move, Pages
from holdfast.devices.cuda import device as device_module
from holdfast.devices.cuda.device import CudaDevice
from holdfast.devices.driver import DriverError
from holdfast.devices.registry import DeviceOptions
from holdfast.errors import BlockError
from holdfast.testing.page_locks import TestLocks
from holdfast.testing.simulated_driver import SimulatedDriver

COUNT, PER_BLOCK, SLOTS = 24, 2, 10
WIDE, NARROW = 64, 24
PAYLOAD = (3 * WIDE + 2 * NARROW) * PER_BLOCK
SLOT = PAYLOAD + 32
CHUNK = 2 * SLOT + 100
"""Not a multiple of slots, so that payloads cross the borders of locks."""


class Arena:
    def __init__(self, nbytes):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.view = memoryview(self.bytes)


class Machine:
    """An engine's pages of two sizes, a device on a simulated driver, an arena and its locks."""

    def __init__(self, seed=0, step_blocks=3):
        self.random = np.random.default_rng(seed)
        self.driver = SimulatedDriver(seed)
        self.wide = self.random.integers(0, 256, (3, COUNT, WIDE + 16), np.uint8)
        self.narrow = self.random.integers(0, 256, (2, COUNT, NARROW), np.uint8)
        groups = tuple(
            LayerPages(tuple(layer.ctypes.data for layer in layers), layers.shape[2], size)
            for layers, size in ((self.wide, WIDE), (self.narrow, NARROW))
        )
        self.pages = Pages(groups, COUNT, PER_BLOCK)
        assert self.pages.payload_bytes == PAYLOAD
        self.device = CudaDevice(self.driver, self.pages, DeviceOptions(step_blocks), self.wide)
        self.arena = Arena(-(-SLOTS * SLOT // CHUNK) * CHUNK)
        self.locks = TestLocks(self.driver, self.arena, CHUNK)

    def lock_all(self):
        for chunk in range(self.arena.nbytes // CHUNK):
            self.locks.lock(chunk)

    def block(self, ids):
        """The payload of a block that has these pages now."""
        wide = [self.wide[layer, page, :WIDE] for layer in range(3) for page in ids]
        narrow = [self.narrow[layer, page] for layer in range(2) for page in ids]
        return b"".join(part.tobytes() for part in wide + narrow)

    def payload(self, slot):
        return self.arena.bytes[slot * SLOT : slot * SLOT + PAYLOAD].tobytes()

    def fill(self, slot):
        """Put new content into a slot; return it."""
        content = self.random.integers(0, 256, PAYLOAD, np.uint8)
        self.arena.bytes[slot * SLOT : slot * SLOT + PAYLOAD] = content
        return content.tobytes()

    def overwrite(self, ids):
        """Let the engine's next work overwrite pages."""
        seed = int(self.random.integers(1 << 30))

        def work():
            new = np.random.default_rng(seed)
            self.wide[:, ids] = new.integers(0, 256, self.wide[:, ids].shape, np.uint8)
            self.narrow[:, ids] = new.integers(0, 256, self.narrow[:, ids].shape, np.uint8)

        self.driver.compute(work)

    def save(self, blocks, slots, locks):
        """Save blocks into slots; return whether the copy succeeded."""
        staged = self.device.stage(blocks)
        staged.pack()
        while not staged.ready():
            pass
        payloads = [(at, slot * SLOT) for at, slot in enumerate(slots)]
        copied = staged.copy(self.arena, payloads, locks).result()
        staged.release()
        return copied


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


CALLS = ("copy", "launch", "record", "wait", "pause", "query", "synchronise", "create_event")


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


PAGE_SETS = st.lists(st.integers(0, COUNT - 1), min_size=2, max_size=6, unique=True)
MOSTLY = st.sampled_from([True, True, True, False])


class Traffic(RuleBasedStateMachine):
    """Steps of an engine, saves, loads, recalls and errors in any order.

    `frozen` has the content of every slot that no copy may write now. `wide` and `narrow` are the
    pages as they will be when all that the engine has queued has run.
    """

    @initialize(seed=st.integers(0, 1000), fails=st.sampled_from([False, False, True]))
    def start(self, seed, fails):
        self.machine = Machine(seed)
        self.machine.lock_all()
        self.fails = fails
        self.wide, self.narrow = self.machine.wide.copy(), self.machine.narrow.copy()
        self.frozen = {slot: self.machine.payload(slot) for slot in range(SLOTS)}
        self.saves, self.load = [], None

    def planned(self, ids):
        """The payload of a block that has these pages, after the work queued so far."""
        wide = [self.wide[layer, page, :WIDE] for layer in range(3) for page in ids]
        narrow = [self.narrow[layer, page] for layer in range(2) for page in ids]
        return b"".join(part.tobytes() for part in wide + narrow)

    def usable(self, pages):
        """Blocks of pages that no load fills."""
        filled = {page for move in self.load[1] for page in move.pages} if self.load else set()
        free = [page for page in pages if page not in filled]
        return [free[at : at + 2] for at in range(0, len(free) - 1, 2)]

    @rule(pages=PAGE_SETS, seed=st.integers(0, 1 << 20))
    def engine_computes(self, pages, seed):
        ids = [page for block in self.usable(pages) for page in block]
        machine = self.machine

        def compute(wide, narrow):
            new = np.random.default_rng(seed)
            wide[:, ids, :WIDE] = new.integers(0, 256, (3, len(ids), WIDE), np.uint8)
            narrow[:, ids] = new.integers(0, 256, (2, len(ids), NARROW), np.uint8)

        compute(self.wide, self.narrow)
        machine.driver.compute(lambda: compute(machine.wide, machine.narrow))

    @rule(pages=PAGE_SETS)
    def save_begins(self, pages):
        blocks = self.usable(pages)
        if not blocks:
            return
        staged = None
        with contextlib.suppress(DeviceError):
            staged = self.machine.device.stage(blocks)
        if staged is not None:
            try:
                staged.pack()
            except DeviceError:
                staged.release()
            else:
                self.saves.append([staged, [self.planned(ids) for ids in blocks], None, ()])

    @precondition(lambda self: any(save[2] is None for save in self.saves))
    @rule(which=st.integers(0, 3), slots=st.permutations(range(SLOTS)), use_locks=MOSTLY)
    def save_copies(self, which, slots, use_locks):
        waiting = [save for save in self.saves if save[2] is None]
        save = waiting[which % len(waiting)]
        free = [slot for slot in slots if slot in self.frozen][: len(save[1])]
        leased = [move.payload // SLOT for move in self.load[1]] if self.load else []
        free = [slot for slot in free if slot not in leased]
        payloads = [(at, slot * SLOT) for at, slot in enumerate(free)]
        try:
            if save[0].ready():
                locks = self.machine.locks if use_locks else None
                save[2] = save[0].copy(self.machine.arena, payloads, locks)
                save[3] = free
                for slot in free:
                    del self.frozen[slot]
        except DeviceError:
            self.refreeze(free)
            save[0].release()
            self.saves.remove(save)

    @precondition(lambda self: any(save[2] is not None for save in self.saves))
    @rule(which=st.integers(0, 3), wait=st.booleans())
    def save_ends(self, which, wait):
        copying = [save for save in self.saves if save[2] is not None]
        save = copying[which % len(copying)]
        staged, contents, transfer, slots = save
        if wait or transfer.done():
            if transfer.result():
                for slot, content in zip(slots, contents, strict=False):
                    assert self.machine.payload(slot) == content
            self.refreeze(slots)
            staged.release()
            self.saves.remove(save)

    @precondition(lambda self: any(save[2] is None for save in self.saves))
    @rule(which=st.integers(0, 3))
    def save_is_given_up(self, which):
        waiting = [save for save in self.saves if save[2] is None]
        save = waiting[which % len(waiting)]
        save[0].release()
        self.saves.remove(save)

    @precondition(lambda self: self.load is None)
    @rule(slots=st.permutations(range(SLOTS)), pages=PAGE_SETS, use_locks=MOSTLY)
    def load_begins(self, slots, pages, use_locks):
        blocks = self.usable(pages)
        held = [slot for slot in slots if slot in self.frozen]
        if not blocks:
            return
        moves = [Move(slot * SLOT, ids) for slot, ids in zip(held, blocks, strict=False)]
        contents = [self.machine.payload(move.payload // SLOT) for move in moves]
        machine = self.machine
        try:
            locks = machine.locks if use_locks else None
            transfer = machine.device.scatter(machine.arena, moves, machine.device.mark(), locks)
        except DeviceError:
            self.take_over([page for move in moves for page in move.pages])
        else:
            self.load = transfer, moves, contents

    @precondition(lambda self: self.load is not None)
    @rule(wait=st.booleans())
    def load_ends(self, wait):
        if not (wait or self.load[0].done()):
            return
        transfer, moves, contents = self.load
        if transfer.result():
            for move, content in zip(moves, contents, strict=True):
                assert self.machine.block(list(move.pages)) == content
        self.load = None
        self.take_over([page for move in moves for page in move.pages])

    @rule(chunk=st.integers(0, SLOTS // 2 - 1), recall=st.booleans())
    def chunk_is_locked_or_recalled(self, chunk, recall):
        (self.machine.locks.recall if recall else self.machine.locks.lock)(chunk)

    @rule(steps=st.integers(1, 20))
    def the_gpu_works(self, steps):
        self.machine.driver.run(steps)

    @precondition(lambda self: self.fails)
    @rule(call=st.sampled_from(CALLS), after=st.integers(0, 6))
    def a_call_will_fail(self, call, after):
        self.machine.driver.fail(call, after)

    @invariant()
    def only_reserved_slots_change(self):
        for slot, content in self.frozen.items():
            assert self.machine.payload(slot) == content

    @invariant()
    def only_locked_memory_is_copied_without_a_bounce(self):
        assert not self.machine.driver.faults

    def refreeze(self, slots):
        for slot in slots:
            self.frozen[slot] = self.machine.payload(slot)

    def take_over(self, pages):
        """Take over what a load has left in its pages."""
        self.machine.driver.run()
        self.wide[:, pages] = self.machine.wide[:, pages]
        self.narrow[:, pages] = self.machine.narrow[:, pages]

    def teardown(self):
        self.machine.driver.mend()
        if self.load is not None:
            self.load_ends(wait=True)
        while any(save[2] is not None for save in self.saves):
            self.save_ends(0, wait=True)
        while self.saves:
            self.save_is_given_up(0)
        self.machine.driver.run()
        assert not self.machine.locks.uses
        assert self.machine.device.staged_blocks == 0
        assert (self.machine.wide[:, :, :WIDE] == self.wide[:, :, :WIDE]).all()
        self.machine.device.close()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=40)
