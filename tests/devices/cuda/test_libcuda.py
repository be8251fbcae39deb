"""NVIDIA's driver, as far as it can be tested without one: each call with the types it declares."""

import ctypes
import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.devices.cuda import libcuda
from holdfast.devices.cuda.libcuda import COPIES_MAX, CudaDriver, Tuning
from holdfast.devices.driver import Copies, DriverError, PageCopy, PageTable

OUTPUTS = {
    "cuCtxGetCurrent": (ctypes.c_void_p, 0xC0),
    "cuDriverGetVersion": (ctypes.c_int, 12_080),
    "cuStreamCreateWithPriority": (ctypes.c_void_p, 0x51),
    "cuEventCreate": (ctypes.c_void_p, 0xE1),
    "cuMemAlloc_v2": (ctypes.c_uint64, 0x10000),
    "cuModuleGetFunction": (ctypes.c_void_p, 0xF1),
    "cuDeviceGetAttribute": (ctypes.c_int, 9),
}
"""What a call writes through its first argument."""


class FakeLibrary:
    """Notes calls whose arguments have the declared number and types; `fails` has results."""

    def __init__(self):
        self.calls, self.fails, self.memory = [], {}, []
        self.outputs = dict(OUTPUTS)

    def __getattr__(self, name):
        types = libcuda._SIGNATURES[name]

        def call(*arguments):
            assert len(arguments) == len(types), name
            for kind, argument in zip(types, arguments, strict=True):
                kind.from_param(argument)
            self.calls.append((name, *arguments))
            if name in self.outputs:
                kind, value = self.outputs[name]
                ctypes.cast(arguments[0], ctypes.POINTER(kind))[0] = value
            if name == "cuMemHostAlloc":
                self.memory.append(np.zeros(arguments[1].value, np.uint8))
                address = self.memory[-1].ctypes.data
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = address
            if name == "cuGetErrorString":
                self.memory.append(ctypes.create_string_buffer(b"out of memory"))
                text = ctypes.addressof(self.memory[-1])
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_void_p))[0] = text
            return self.fails.get(name, 0)

        return call

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def libraries():
    return FakeLibrary(), FakeLibrary()


@pytest.fixture
def driver(libraries):
    return CudaDriver(lambda: 0x5E, lambda: libraries)


def numbers_at(address, count):
    return list((ctypes.c_uint64 * count).from_address(address))


def test_a_batch_of_copies_is_one_call_with_its_order_of_reads(driver, libraries):
    quick, _ = libraries
    seen = []

    def batch(to, source, nbytes, count, attributes, *rest):
        order = ctypes.cast(attributes, ctypes.POINTER(libcuda._CopyAttributes))[0].order
        seen.append(([numbers_at(each, count) for each in (to, source, nbytes)], order, rest[-1]))
        return 0

    quick.cuMemcpyBatchAsync = batch
    copies = Copies([1, 2, 3], [40, 50, 60], [7, 8, 9])
    driver.copy(copies, 0x51, source_complete=True)
    driver.copy(copies, 0x51, source_complete=False)
    assert seen == [
        ([[1, 2, 3], [40, 50, 60], [7, 8, 9]], libcuda._ORDER_ANY, 0x51),
        ([[1, 2, 3], [40, 50, 60], [7, 8, 9]], libcuda._ORDER_STREAM, 0x51),
    ]


def test_no_batch_has_more_copies_than_a_driver_takes(driver, libraries):
    count = 2 * COPIES_MAX + 5
    numbers = list(range(count))
    driver.copy(Copies(numbers, numbers, numbers), 0x51, source_complete=True)
    counts = [call[3] for call in libraries[0].of("cuMemcpyBatchAsync")]
    assert counts == [COPIES_MAX, COPIES_MAX, 5]


def test_a_driver_without_batches_copies_one_by_one(libraries):
    libraries[0].outputs["cuDriverGetVersion"] = (ctypes.c_int, 12_040)
    driver = CudaDriver(lambda: 0, lambda: libraries)
    driver.copy(Copies([1, 2], [3, 4], [5, 6]), 0x51, source_complete=True)
    assert libraries[0].of("cuMemcpyAsync") == [(1, 3, 5, 0x51), (2, 4, 6, 0x51)]


def test_a_driver_that_is_told_so_copies_one_by_one(libraries):
    driver = CudaDriver(lambda: 0, lambda: libraries, Tuning(batches=False))
    driver.copy(Copies([1, 2], [3, 4], [5, 6]), 0x51, source_complete=True)
    assert libraries[0].of("cuMemcpyAsync") == [(1, 3, 5, 0x51), (2, 4, 6, 0x51)]


def test_calls_that_wait_release_the_gil_and_others_keep_it(driver, libraries):
    event, stream = driver.create_event(), driver.create_stream(urgent=True)
    quick, slow = libraries
    for library in libraries:
        library.calls.clear()
    driver.record(event, stream)
    driver.wait(stream, event)
    driver.query(event)
    driver.copy(Copies([1], [2], [3]), stream, source_complete=True)
    assert slow.calls == []
    assert len(quick.calls) == 4
    quick.calls.clear()
    driver.synchronise(event)
    driver.register(4096, 4096)
    driver.unregister(4096)
    driver.bounce(Copies([1], [2], [3]), stream)
    assert quick.calls == []
    assert [call[0] for call in slow.calls] == [
        "cuEventSynchronize",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuMemcpyAsync",
        "cuStreamSynchronize",
    ]


def test_a_refused_copy_leaves_no_earlier_one_on_its_way(driver, libraries):
    _, slow = libraries
    slow.fails["cuMemcpyAsync"] = 1
    with pytest.raises(DriverError, match="cuMemcpyAsync"):
        driver.bounce(Copies([1, 2], [3, 4], [5, 6]), 0x51)
    assert slow.of("cuStreamSynchronize") == [(0x51,)]


def test_an_error_names_the_call_and_the_drivers_reason(driver, libraries):
    libraries[1].fails["cuMemHostRegister_v2"] = 2
    with pytest.raises(DriverError, match="cuMemHostRegister_v2: error 2, out of memory"):
        driver.register(4096, 4096)


def test_an_event_that_has_not_ended_is_no_error(driver, libraries):
    event = driver.create_event()
    assert driver.query(event)
    libraries[0].fails["cuEventQuery"] = 600
    assert not driver.query(event)
    libraries[0].fails["cuEventQuery"] = 700
    with pytest.raises(DriverError, match="cuEventQuery"):
        driver.query(event)


def test_each_thread_sets_the_context_once_and_does_not_end_a_capture(driver, libraries):
    event = driver.create_event()
    assert libraries[0].of("cuCtxSetCurrent") == []  # the engine's thread has its context

    def work():
        driver.query(event)
        driver.query(event)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (context,) = libraries[0].of("cuCtxSetCurrent")
    assert context[0].value == 0xC0
    assert len(libraries[0].of("cuThreadExchangeStreamCaptureMode")) == 1


def test_a_machine_without_the_drivers_library_or_a_context_is_named(libraries):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    with pytest.raises(DriverError, match=r"libcuda\.so\.1 cannot be loaded"):
        CudaDriver(lambda: 0, missing)
    libraries[0].outputs["cuCtxGetCurrent"] = (ctypes.c_void_p, 0)
    with pytest.raises(DriverError, match="no context of a GPU is current"):
        CudaDriver(lambda: 0, lambda: libraries)


def test_locked_memory_can_be_written(driver):
    memory = driver.allocate_locked(64).cast("i")
    memory[1::2] = memory[0::2]
    memory[3] = 7
    assert memory[3] == 7


def test_a_launch_passes_every_number_in_its_type_and_scratch_memory_as_zero(
    driver, libraries, monkeypatch
):
    parameters = ["uint64"] * 3 + ["int32"] * 4 + ["int64"] * 2 + ["uint64"] * 2
    code = SimpleNamespace(
        code=b"\x7fELF", name="copy_pages", threads=128, shared_bytes=0, parameters=parameters
    )
    numbers, asked = (200, 3, 1, 8, 5000, 600), []
    made = SimpleNamespace(
        variant_of=lambda work: (work.table.page_bytes, work.to_pages),
        arguments_of=lambda work: numbers,
        for_nvidia=lambda variant, major, minor, warps: asked.append(warps) or code,
    )
    monkeypatch.setitem(sys.modules, "holdfast.devices.cuda.compiled", made)
    monkeypatch.setattr("holdfast.devices.cuda.compiled", made, raising=False)
    seen = []

    def launch(function, *shape):
        pointers = shape[8]
        kinds = [getattr(ctypes, f"c_{kind}") for kind in parameters]
        values = [
            kind.from_address(at).value for kind, at in zip(kinds, list(pointers), strict=True)
        ]
        seen.append((function, shape[:8], values))
        return 0

    libraries[0].cuLaunchKernel = launch
    table = PageTable(0x8000, 3, 600 * 8, 512, 16)
    driver.launch(PageCopy(table, 0x9000, 200, 0xA000, 40_000, 8, True, 1, 2), 0x51)
    assert seen == [
        (0xF1, (200, 1, 1, 128, 1, 1, 0, 0x51), [0x8008, 0x9000, 0xA000, *numbers, 0, 0])
    ]
    tuned = CudaDriver(lambda: 0, lambda: libraries, Tuning(programs_max=7, warps=8))
    tuned.launch(PageCopy(table, 0x9000, 200, 0xA000, 40_000, 8, True, 1, 2), 0x51)
    assert seen[1][1][0] == 7
    assert asked == [4, 8]


def test_an_event_that_nothing_has_any_more_is_used_again(driver, libraries):
    """To create and destroy events for each batch would keep the engine's thread."""
    first, second = driver.create_event(), driver.create_event()
    assert len(libraries[0].of("cuEventCreate")) == 2
    handle = first.handle
    del first
    again = driver.create_event()
    assert again.handle == handle
    assert len(libraries[0].of("cuEventCreate")) == 2
    assert not libraries[1].of("cuEventDestroy_v2")
    driver.close()
    assert len(libraries[1].of("cuEventDestroy_v2")) == 2
    del second, again


def test_a_child_does_not_destroy_its_parents_events(driver, libraries):
    event = driver.create_event()
    child = os.fork()
    if not child:
        event.__del__()
        os._exit(sum(len(library.of("cuEventDestroy_v2")) for library in libraries))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
