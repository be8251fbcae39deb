"""The formats of pages of vLLM's CPU attention, against vLLM's kernel itself."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from holdfast.devices.page_format import cpu_format  # noqa: E402
from holdfast.engines.vllm.cpu_pages import check_kernel  # noqa: E402
from holdfast.engines.vllm.unsupported import UnsupportedError  # noqa: E402

TYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_the_kernel_of_each_instruction_set_writes_pages_of_the_known_format(isa, dtype):
    """The kernel packs pages of AMX on processors without it, too."""
    for tokens in (32, 128, 1152):
        for size in (64, 80, 128):
            check_kernel(cpu_format(isa, 2, tokens, size, dtype.itemsize), isa, dtype)


@pytest.mark.parametrize(("real", "taken"), [("amx", "vec"), ("vec", "amx")])
def test_a_kernel_that_packs_in_another_order_is_refused(real, taken):
    with pytest.raises(UnsupportedError, match=f"'{real}' pages in another way"):
        check_kernel(cpu_format(taken, 2, 128, 64, 2), real, torch.bfloat16)


def test_an_instruction_set_that_the_kernel_does_not_know_is_refused():
    with pytest.raises(UnsupportedError, match="does not write pages of 'vsx2'"):
        check_kernel(cpu_format("vec", 1, 32, 32, 2), "vsx2", torch.bfloat16)
