"""A long copy in pieces copies everything, with and without a kernel between them."""

import pytest

torch = pytest.importorskip("torch")

from holdfast_bench.measure.gpu.accelerator import HostAccelerator  # noqa: E402
from holdfast_bench.measure.gpu.pieces import PiecedCopy  # noqa: E402

KIB = 1 << 10


@pytest.mark.parametrize("pause", [True, False])
@pytest.mark.parametrize("piece_bytes", [4 * KIB, 12 * KIB, 64 * KIB])
def test_every_byte_is_copied(piece_bytes, pause):
    copy = PiecedCopy(HostAccelerator(), 32 * KIB, 4 * KIB)
    copy._mapped.view[:] = bytes(range(256)) * 128
    copy.copy(piece_bytes, pause=pause)
    assert copy._on_gpu.tolist() == list(copy._mapped.view)
    copy.close()
