"""The calls of the bench to a GPU, answered by memory of the host."""

import contextlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from holdfast.devices.cuda.libcuda import Tuning  # noqa: E402
from holdfast.errors import ConfigError  # noqa: E402
from holdfast_bench.measure.gpu import accelerator as module  # noqa: E402
from holdfast_bench.measure.gpu import bus, decode  # noqa: E402
from holdfast_bench.measure.gpu.accelerator import CudaAccelerator, EagerDriver, accelerator  # noqa: E402


class FakeStream:
    cuda_stream = 7

    def wait_stream(self, _other):
        pass

    def synchronize(self):
        pass


class FakeGraph:
    """Captures nothing: the work was done at the capture, and a replay does it again."""

    def replay(self):
        pass


class FakeCuda:
    """What the bench asks of `torch.cuda`; work is done at once."""

    CUDAGraph = FakeGraph
    Stream = FakeStream

    def __init__(self):
        self.slept = 0

    def is_available(self):
        return True

    def get_device_name(self):
        return "NVIDIA Test"

    def get_device_properties(self, _gpu):
        return SimpleNamespace(total_memory=80 << 30)

    def synchronize(self):
        pass

    def current_stream(self):
        return FakeStream()

    def stream(self, _stream):
        return contextlib.nullcontext()

    def graph(self, _graph):
        return contextlib.nullcontext()

    def _sleep(self, cycles):
        self.slept += cycles


class OnHost(CudaAccelerator):
    """The bench's GPU, whose memory is the host's."""

    kind = "cpu"


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def gpu(monkeypatch, cuda):
    def zeros(*size, pin_memory=False, **named):
        del pin_memory
        return torch.zeros(*size, **named)

    fake = SimpleNamespace(cuda=cuda, zeros=zeros, uint8=torch.uint8)
    monkeypatch.setattr(module, "torch", fake)
    return OnHost()


def test_a_gpu_has_a_name_memory_and_work(gpu, cuda):
    assert (gpu.name(), gpu.memory_bytes()) == ("NVIDIA Test", 80 << 30)
    assert gpu.pinned(8).tolist() == gpu.bytes(8).tolist() == [0] * 8
    gpu.occupy(0.5)
    assert cuda.slept == 500_000_000
    assert gpu.seconds(lambda: None) >= 0


def test_phases_run_on_it(gpu, measured, monkeypatch):
    monkeypatch.setattr(OnHost, "driver", lambda _: EagerDriver(1))
    assert measured(bus, gpu=gpu)["gpu.bus.to.1"].more["gpu"] == "NVIDIA Test"
    assert measured(decode, gpu=gpu)["gpu.decode.load"].ratio > 0


def test_the_driver_is_that_of_the_engines_stream(gpu, monkeypatch):
    monkeypatch.setattr(
        module, "CudaDriver", lambda engine_stream, tuning: (engine_stream(), tuning)
    )
    assert gpu.driver() == (FakeStream.cuda_stream, Tuning())
    other = Tuning(programs_max=132, batches=False)
    assert gpu.driver(other) == (FakeStream.cuda_stream, other)


def test_without_a_gpu_there_is_a_rehearsal_only(gpu, monkeypatch):
    monkeypatch.setattr(gpu.__class__.__mro__[1], "__init__", CudaAccelerator.__init__)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU that torch can use"):
        accelerator(rehearse=False)
    assert accelerator(rehearse=True).name() == "none (rehearsal)"
