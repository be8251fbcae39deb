"""The conversion's bytes are compared before it is timed, and portable blocks come back."""

import pytest

torch = pytest.importorskip("torch")

from holdfast.errors import HoldfastError  # noqa: E402
from holdfast_bench.measure.gpu import conversion  # noqa: E402
from holdfast_bench.measure.gpu.conversion import ConvertedPages  # noqa: E402
from holdfast_bench.measure.gpu.shapes import FUSED_TOY  # noqa: E402


def test_the_conversion_is_measured_beside_pages_as_they_are(measured):
    found = measured(conversion)
    assert {what: row.goal for what, row in found.items()} == {
        "gpu.convert.pack.toy": 0.8,
        "gpu.convert.unpack.toy": 0.8,
        "gpu.load.toy.3.portable": 0.95,
        "gpu.save.toy.3.portable": 0.95,
    }
    assert all(row.limit > 0 for row in found.values())


def test_blocks_for_which_no_time_is_left_are_named(measured):
    found = measured(conversion, until_s=0.0)
    assert found["gpu.save.toy.3.portable"].more == {"why": "no time was left"}


@pytest.mark.parametrize("broken", ["a stage", "pages"])
def test_a_conversion_to_other_bytes_is_an_error(setting, broken):
    class Wrong(ConvertedPages):
        def run(self, block, launches, *, to_pages):
            took_s = super().run(block, launches, to_pages=to_pages)
            if to_pages == (broken == "pages"):
                target = self.tensors[-1] if to_pages else self.stage
                target.view(-1)[-1] += 1
            return took_s

    pages = Wrong(setting.gpu, FUSED_TOY, 2)
    with pytest.raises(HoldfastError, match=f"the conversion fills {broken} with other bytes"):
        pages.verify()
    pages.close()
