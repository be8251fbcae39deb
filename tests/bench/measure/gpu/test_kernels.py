"""The kernel's bytes are compared before it is timed."""

import pytest

torch = pytest.importorskip("torch")

from holdfast.errors import HoldfastError  # noqa: E402
from holdfast_bench.measure.gpu import kernels  # noqa: E402
from holdfast_bench.measure.gpu.kernels import KernelPages  # noqa: E402
from holdfast_bench.measure.gpu.shapes import TOY  # noqa: E402


def test_both_directions_and_both_places_of_page_numbers_are_measured(measured):
    found = measured(kernels)
    assert list(found) == [
        *[
            f"gpu.kernel.{what}.toy{ending}"
            for ending in ("", ".rows_on_gpu")
            for what in ("pack", "unpack", "call")
        ],
        *[f"gpu.kernel.{what}.toy.{n}x4" for n in (132, 264) for what in ("pack", "unpack")],
    ]
    assert all(row.value > 0 for row in found.values())


def test_kernels_for_which_no_time_is_left_are_named(measured):
    found = measured(kernels, until_s=0.0)
    assert found["gpu.kernel.toy"].more == {"why": "no time was left"}


@pytest.mark.parametrize("broken", ["a stage", "pages"])
def test_a_kernel_that_copies_other_bytes_is_an_error(setting, broken):
    class Wrong(KernelPages):
        def run(self, launches, *, to_pages):
            took = super().run(launches, to_pages=to_pages)
            if to_pages == (broken == "pages"):
                target = self._tensors[-1] if to_pages else self._stage
                target.view(-1)[-1] += 1
            return took

    pages = Wrong(setting.gpu, TOY, 2)
    with pytest.raises(HoldfastError, match=f"toy: the kernel fills {broken} with other bytes"):
        pages.verify()
    pages.close()
