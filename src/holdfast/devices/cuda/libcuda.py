"""NVIDIA's driver, called by ctypes: `libcuda.so.1`, which comes with every NVIDIA GPU.

Calls of microseconds keep the GIL: to give it up, and to take it again from a busy thread, takes
longer than the call. Calls of milliseconds release it. The kernels are compiled by Triton for this
GPU, and loaded and launched here without it.

Facts about calls, structures and flags are from NVIDIA's CUDA Driver API, 12.8.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.devices.driver import Copies, DriverError, PageConversion, PageCopy

LIBRARY = "libcuda.so.1"

COPIES_MAX = 1024
"""Most copies of one batch call. A driver ended a process whose batch had 51,828 (vLLM #49276)."""

PROGRAMS_MAX = 1056
"""Most programs of a launch: 8 for each multiprocessor of an H100; each does several jobs."""

WARPS = 4
"""Warps of 32 threads in one program."""

BATCH_VERSION = 12_080
"""First version of the driver that copies batches."""


class Tuning(NamedTuple):
    """How kernels and copies are submitted; a benchmark compares other values with these.

    `batches` False: each copy of a batch is a call of its own, as with an older driver.
    """

    programs_max: int = PROGRAMS_MAX
    warps: int = WARPS
    batches: bool = True


TUNING = Tuning()

_READY, _NOT_READY = 0, 600
_NON_BLOCKING_STREAM = 1
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_PORTABLE, _DEVICE_MAPPED = 1, 2
_RELAXED = 2
_ORDER_STREAM, _ORDER_ANY = 1, 3
_MAJOR, _MINOR = 75, 76
"""Attributes of a GPU: its compute capability."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: the order of reads, and hints that are not given."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("to", _Location),
        ("flags", ctypes.c_uint),
    )


class LoadedKernel(NamedTuple):
    """A kernel on the GPU: its function, threads a program, and the types of its parameters."""

    function: int
    threads: int
    shared_bytes: int
    types: Sequence[Any]


class _Event:
    """An event of the driver, which is used again for another when nothing has this object."""

    __slots__ = ("_unused", "handle")

    def __init__(self, handle: int, unused: list[int]) -> None:
        self.handle = handle
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self.handle)


class CudaDriver:
    """The driver of the GPU whose context is current on the calling thread.

    `engine_stream` returns the handle of the stream of the calling thread's engine work. `load`
    returns the library with calls that keep the GIL, and with calls that release it.
    """

    def __init__(
        self,
        engine_stream: Callable[[], int],
        load: Callable[[], tuple[Any, Any]] | None = None,
        tuning: Tuning = TUNING,
    ) -> None:
        self._engine_stream = engine_stream
        self._tuning = tuning
        try:
            self._quick, self._slow = load() if load is not None else _libraries()
        except OSError as error:
            raise DriverError(f"{LIBRARY} cannot be loaded: {error}") from error
        context = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", self._quick.cuCtxGetCurrent(ctypes.byref(context)))
        if not context.value:
            raise DriverError("no context of a GPU is current on the engine's thread")
        self._context = context
        self._thread = threading.local()
        self._thread.entered = True  # the engine's thread is where its engine left it
        version = ctypes.c_int()
        self._check("cuDriverGetVersion", self._quick.cuDriverGetVersion(ctypes.byref(version)))
        self.version = version.value
        self._streams: list[int] = []
        self._memory: list[tuple[Callable[[int], int], int]] = []
        self._events: list[int] = []
        self._unused_events: list[int] = []
        self._kernels: dict[Any, LoadedKernel] = {}
        self._flag = self.allocate(256)

    def create_stream(self, *, urgent: bool) -> int:
        self._enter()
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        stream = ctypes.c_void_p()
        priority = greatest.value if urgent else least.value
        self._call(
            "cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING_STREAM, priority
        )
        self._streams.append(stream.value or 0)
        return self._streams[-1]

    def engine_stream(self) -> int:
        return self._engine_stream()

    def create_event(self) -> _Event:
        with contextlib.suppress(IndexError):  # none is unused
            return _Event(self._unused_events.pop(), self._unused_events)
        self._enter()
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _BLOCKING_SYNC | _DISABLE_TIMING)
        self._events.append(event.value or 0)
        return _Event(self._events[-1], self._unused_events)

    def allocate(self, nbytes: int) -> int:
        self._enter()
        address = ctypes.c_uint64()
        self._wait("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._memory.append((self._slow.cuMemFree_v2, address.value))
        return address.value

    def allocate_locked(self, nbytes: int) -> memoryview:
        self._enter()
        address = ctypes.c_void_p()
        flags = _PORTABLE | _DEVICE_MAPPED
        self._wait("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), flags)
        self._memory.append((self._slow.cuMemFreeHost, address.value or 0))
        memory: Any = (ctypes.c_char * nbytes).from_address(address.value or 0)
        return memoryview(memory).cast("B")

    def write(self, address: int, content: bytes) -> None:
        self._enter()
        self._wait("cuMemcpyHtoD_v2", address, content, len(content))

    def copy(self, copies: Copies, stream: int, *, source_complete: bool) -> None:
        self._enter()
        count = len(copies.to)
        if self.version < BATCH_VERSION or not stream or not self._tuning.batches:
            for to, source, nbytes in zip(*copies, strict=True):
                self._call("cuMemcpyAsync", to, source, nbytes, stream)
            return
        attributes = _CopyAttributes(_ORDER_ANY if source_complete else _ORDER_STREAM)
        lists = [array("Q", numbers) for numbers in copies]
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        for at in range(0, count, COPIES_MAX):
            starts = [each.buffer_info()[0] + 8 * at for each in lists]
            self._call(
                "cuMemcpyBatchAsync", *starts, min(COPIES_MAX, count - at),
                ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream,
            )  # fmt: skip

    def bounce(self, copies: Copies, stream: int) -> None:
        self._enter()
        try:
            for to, source, nbytes in zip(*copies, strict=True):
                self._wait("cuMemcpyAsync", to, source, nbytes, stream)
        finally:
            # A copy from the GPU to memory that is not locked may still be on its way.
            self._wait("cuStreamSynchronize", stream)

    def launch(self, work: PageCopy | PageConversion, stream: int) -> None:
        from holdfast.devices.cuda.compiled import arguments_of, variant_of

        self._enter()
        addresses = (work.table.bases + 8 * work.first_layer, work.rows, work.stage)
        self._launch(variant_of(work), (*addresses, *arguments_of(work)), stream)

    def pause(self, stream: int) -> None:
        from holdfast.devices.cuda.compiled import PauseVariant

        self._enter()
        self._launch(PauseVariant(), (self._flag,), stream)

    def record(self, event: _Event, stream: int) -> None:
        self._enter()
        self._call("cuEventRecord", event.handle, stream)

    def wait(self, stream: int, event: _Event) -> None:
        self._enter()
        self._call("cuStreamWaitEvent", stream, event.handle, 0)

    def query(self, event: _Event) -> bool:
        self._enter()
        result = self._quick.cuEventQuery(event.handle)
        if result == _NOT_READY:
            return False
        self._check("cuEventQuery", result)
        return True

    def synchronise(self, event: _Event) -> None:
        self._enter()
        self._wait("cuEventSynchronize", event.handle)

    def register(self, address: int, nbytes: int) -> None:
        self._enter()
        self._wait("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._enter()
        self._wait("cuMemHostUnregister", address)

    def close(self) -> None:
        self._enter()
        for free, address in self._memory:
            free(address)
        for stream in self._streams:
            self._slow.cuStreamDestroy_v2(stream)
        for event in self._events:
            self._slow.cuEventDestroy_v2(event)
        self._memory, self._streams, self._events = [], [], []
        self._unused_events.clear()

    def _enter(self) -> None:
        """Make the context current on this thread, before its first call.

        A thread of ours does not end a capture of the engine's CUDA graphs (`RELAXED`).
        """
        if getattr(self._thread, "entered", False):
            return
        self._call("cuCtxSetCurrent", self._context)
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        self._thread.entered = True

    def _launch(self, variant: Any, numbers: Sequence[int], stream: int) -> None:
        kernel = self._kernels.get(variant) or self._load(variant)
        programs = min(numbers[3], self._tuning.programs_max) if len(numbers) > 1 else 1
        given = [*numbers, *[0] * (len(kernel.types) - len(numbers))]
        values = [kind(number) for kind, number in zip(kernel.types, given, strict=True)]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._call(
            "cuLaunchKernel", kernel.function, max(programs, 1), 1, 1, kernel.threads, 1, 1,
            kernel.shared_bytes, stream, addresses, None,
        )  # fmt: skip

    def _load(self, variant: Any) -> LoadedKernel:
        """Compile a kernel for this GPU, and load it."""
        from holdfast.devices.cuda import compiled

        device = ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        capability = [ctypes.c_int(), ctypes.c_int()]
        for number, attribute in zip(capability, (_MAJOR, _MINOR), strict=True):
            self._call("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        major, minor = (number.value for number in capability)
        made = compiled.for_nvidia(variant, major, minor, self._tuning.warps)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._wait("cuModuleLoadData", ctypes.byref(module), made.code)
        self._wait("cuModuleGetFunction", ctypes.byref(function), module, made.name.encode())
        types = [getattr(ctypes, f"c_{kind}") for kind in made.parameters]
        kernel = LoadedKernel(function.value or 0, made.threads, made.shared_bytes, types)
        self._kernels[variant] = kernel
        return kernel

    def _call(self, name: str, *arguments: Any) -> None:
        """Make a call that takes microseconds, without giving up the GIL."""
        self._check(name, getattr(self._quick, name)(*arguments))

    def _wait(self, name: str, *arguments: Any) -> None:
        """Make a call that may take milliseconds, without the GIL."""
        self._check(name, getattr(self._slow, name)(*arguments))

    def _check(self, name: str, result: int) -> None:
        if result != _READY:
            text = ctypes.c_char_p()
            self._quick.cuGetErrorString(result, ctypes.byref(text))
            said = (text.value or b"unknown").decode()
            raise DriverError(f"{name}: error {result}, {said}")


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (ctypes.c_void_p,),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuCtxGetDevice": (ctypes.c_void_p,),
    "cuCtxGetStreamPriorityRange": (ctypes.c_void_p, ctypes.c_void_p),
    "cuDeviceGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    "cuDriverGetVersion": (ctypes.c_void_p,),
    "cuEventCreate": (ctypes.c_void_p, ctypes.c_uint),
    "cuEventDestroy_v2": (ctypes.c_void_p,),
    "cuEventQuery": (ctypes.c_void_p,),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventSynchronize": (ctypes.c_void_p,),
    "cuGetErrorString": (ctypes.c_int, ctypes.c_void_p),
    "cuLaunchKernel": (
        ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
    ),
    "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemFreeHost": (ctypes.c_void_p,),
    "cuMemHostAlloc": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemcpyBatchAsync": (
        *[ctypes.c_void_p] * 3, ctypes.c_size_t, *[ctypes.c_void_p] * 2, ctypes.c_size_t,
        *[ctypes.c_void_p] * 2,
    ),
    "cuMemcpyHtoD_v2": (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t),
    "cuModuleGetFunction": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p),
    "cuModuleLoadData": (ctypes.c_void_p, ctypes.c_char_p),
    "cuStreamCreateWithPriority": (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int),
    "cuStreamDestroy_v2": (ctypes.c_void_p,),
    "cuStreamSynchronize": (ctypes.c_void_p,),
    "cuStreamWaitEvent": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
    "cuThreadExchangeStreamCaptureMode": (ctypes.c_void_p,),
}  # fmt: skip
"""The types of each call's arguments; each returns 0 or the number of an error."""


@functools.cache
def _libraries() -> tuple[Any, Any]:
    return with_signatures(ctypes.PyDLL(LIBRARY)), with_signatures(ctypes.CDLL(LIBRARY))


def with_signatures(library: Any) -> Any:
    """Set the types of the calls of a loaded library, and return it."""
    for name, types in _SIGNATURES.items():
        if name == "cuMemcpyBatchAsync" and not hasattr(library, name):
            continue  # a driver before `BATCH_VERSION`
        call = getattr(library, name)
        call.argtypes, call.restype = types, ctypes.c_int
    return library
