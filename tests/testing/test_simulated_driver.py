"""The simulated driver runs queued work in every right order, and in no wrong one."""

import numpy as np
import pytest

from holdfast.devices.driver import Copies, DriverError, PageCopy, PageTable
from holdfast.testing.simulated_driver import POISON, SimulatedDriver

SEEDS = range(40)


def address_of(memory):
    return np.frombuffer(memory, np.uint8).ctypes.data


def copied(driver, to, source, nbytes, stream):
    driver.copy(Copies([to], [source], [nbytes]), stream, source_complete=True)


@pytest.mark.parametrize("waits", [True, False])
def test_streams_are_ordered_by_events_only(waits):
    """Without the event some seed copies too early, with it none does."""
    found = set()
    for seed in SEEDS:
        driver = SimulatedDriver(seed)
        host = driver.allocate_locked(64)
        host[:] = bytes([1]) * 64
        gpu, back = driver.allocate(64), driver.allocate_locked(64)
        up, down = driver.create_stream(urgent=False), driver.create_stream(urgent=True)
        event = driver.create_event()
        copied(driver, gpu, address_of(host), 64, up)
        driver.record(event, up)
        if waits:
            driver.wait(down, event)
        copied(driver, address_of(back), gpu, 64, down)
        assert driver.run() is False
        found.add(bytes(back))
    assert (found == {bytes([1]) * 64}) == waits
    assert waits or bytes([POISON]) * 64 in found


def test_an_event_that_is_recorded_again_is_waited_for_as_it_was():
    for seed in SEEDS:
        driver, order = SimulatedDriver(seed), []
        one = driver.create_stream(urgent=False)
        event = driver.create_event()
        driver.compute(lambda order=order: order.append("first"))
        driver.record(event, driver.engine_stream())
        driver.wait(one, event)
        driver.compute(lambda order=order: order.append("second"))
        driver.record(event, driver.engine_stream())
        done = driver.create_event()
        driver.record(done, one)
        driver.synchronise(done)
        assert order[0] == "first"
        driver.synchronise(event)
        assert order == ["first", "second"]


def test_pages_are_copied_as_a_kernel_copies_them():
    driver = SimulatedDriver(3)
    layers = [np.random.default_rng(at).integers(0, 256, (9, 40), np.uint8) for at in range(3)]
    bases = driver.allocate(24)
    driver.write(bases, np.array([layer.ctypes.data for layer in layers], np.int64).tobytes())
    table = PageTable(bases, 3, 40, 32, 8)
    rows = driver.allocate_locked(64)
    pairs = [(5, 0), (2, 1), (8, 2), (0, 3)]
    rows[:32] = np.array(pairs, np.int32).tobytes()
    stage = driver.allocate(2 * 3 * 2 * 32)
    driver.launch(PageCopy(table, address_of(rows), 4, stage, 3 * 2 * 32, 2, to_pages=False), 0)
    driver.run()
    held = driver._bytes(stage, 2 * 3 * 2 * 32).reshape(2, 3, 2, 32)
    for page, slot in pairs:
        for layer in range(3):
            assert (held[slot // 2, layer, slot % 2] == layers[layer][page, :32]).all()


def test_a_copy_of_memory_that_is_not_locked_is_a_fault():
    driver, memory = SimulatedDriver(), np.zeros(100, np.uint8)
    gpu, stream = driver.allocate(100), driver.create_stream(urgent=False)
    driver.register(memory.ctypes.data, 60)
    copied(driver, gpu, memory.ctypes.data, 60, stream)
    driver.run()
    assert not driver.faults
    copied(driver, gpu, memory.ctypes.data, 61, stream)
    assert driver.faults == ["a copy is queued whose memory is not locked"]
    driver.register(memory.ctypes.data + 60, 40)
    driver.run()
    driver.faults.clear()
    copied(driver, gpu, memory.ctypes.data, 100, stream)
    driver.locked.clear()
    driver.run()
    assert "a copy runs whose memory is not locked" in driver.faults


def test_locks_that_overlap_or_do_not_exist_are_refused():
    driver = SimulatedDriver()
    driver.register(4096, 4096)
    with pytest.raises(DriverError, match="already locked"):
        driver.register(8191, 10)
    with pytest.raises(DriverError, match="no locked memory begins"):
        driver.unregister(4097)
    driver.unregister(4096)


def test_a_call_can_fail_once_or_from_then_on():
    driver = SimulatedDriver()
    event = driver.create_event()
    driver.fail("query", after=1)
    assert driver.query(event)
    with pytest.raises(DriverError, match="query"):
        driver.query(event)
    assert driver.query(event)
    driver.fail("record", lasting=True)
    with pytest.raises(DriverError):
        driver.record(event, 0)
    with pytest.raises(DriverError, match="earlier error"):
        driver.query(event)
