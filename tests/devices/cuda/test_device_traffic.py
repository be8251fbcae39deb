"""Saves, loads, recalls and errors of the device of GPU pages, in any order."""

import contextlib
from concurrent.futures import Future

import numpy as np
import pytest
from gpu_machine import CALLS, COUNT, NARROW, PAYLOAD, SLOT, SLOTS, WIDE, Machine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.devices.base import DeviceError, Move
from holdfast.devices.cuda import device as device_module


class LateWork(Future):
    """A future whose work is done by whoever first asks for its state or its result."""

    def __init__(self, work):
        super().__init__()
        self._work = work

    def done(self):
        if self._work is not None:
            work, self._work = self._work, None
            self.set_result(work())
        return super().done()

    def result(self, timeout=None):
        self.done()
        return super().result(timeout)


class LateWorkers:
    """Workers that are no threads, and do their work late."""

    def __init__(self, *_):
        self._given = []

    def submit(self, work, *arguments):
        self._given.append(LateWork(lambda: work(*arguments)))
        return self._given[-1]

    def shutdown(self, **_):
        for each in self._given:
            each.done()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(device_module, "PIECE_BYTES", 4 * PAYLOAD)


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """What happens follows from what hypothesis draws, and from no thread and no clock.

    Otherwise the rules that are possible after the same draws differ from run to run, which
    hypothesis reports as an error of the test.
    """
    monkeypatch.setattr(device_module, "workers", LateWorkers)
    monkeypatch.setattr(device_module, "SAVE_S", 3600.0)


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
