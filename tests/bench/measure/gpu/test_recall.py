"""How soon recalled memory serves another domain; io_uring takes the place of a GPU."""

import pytest

pytest.importorskip("torch")

from holdfast.errors import HoldfastError
from holdfast.testing.pinned_device import PinnedDevice
from holdfast_bench.measure.gpu import recall


def io_uring_works():
    try:
        PinnedDevice().close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")
def test_the_wait_for_memory_that_another_engine_has_locked_is_measured(measured):
    found = measured(recall)
    assert {what: (row.goal, row.more) for what, row in found.items()} == {
        "gpu.recall": (0.3, {"rounds": recall.TOY_ROUNDS}),
        "gpu.recall.worst": (17.0, {"rounds": recall.TOY_ROUNDS}),
    }
    assert found["gpu.recall"].value > 0


@pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")
def test_memory_that_was_not_asked_back_is_no_figure(measured, monkeypatch):
    fill = recall._fill
    monkeypatch.setattr(recall, "_fill", lambda one, domain: domain == 1 and fill(one, domain))
    with pytest.raises(HoldfastError, match="no memory was asked back: 6291456 bytes are still"):
        measured(recall)


@pytest.mark.skipif(not io_uring_works(), reason="io_uring is forbidden here")
def test_memory_that_cannot_be_locked_is_no_figure(measured, monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(PinnedDevice, "register", refuse)
    with pytest.raises(HoldfastError, match=r"only 0 bytes could be locked: .*memory"):
        measured(recall)


def test_without_io_uring_nothing_is_measured(measured, monkeypatch):
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(recall, "PinnedDevice", refuse)
    (row,) = measured(recall).values()
    assert "io_uring cannot be used here: Operation not permitted" in row.more["why"]
