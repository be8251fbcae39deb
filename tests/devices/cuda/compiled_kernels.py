"""The kernels compiled for GPUs that are not here; run by `test_kernels.py`.

On sm_90 and gfx942 each thread must load and store 16 bytes at a time if the sizes allow it.
"""

import re

import pytest
from triton.backends.compiler import GPUTarget

from holdfast.devices.cuda.compiled import ConvertVariant, CopyVariant, compiled

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WIDE = {"sm_90": r"\.v4\.b32|\.v2\.b64", "gfx942": "dwordx4"}
LOADS = {"sm_90": r"ld\.global[\w.:]*", "gfx942": r"(?:global|buffer|flat)_load_\w+"}
STORES = {"sm_90": r"st\.global[\w.:]*", "gfx942": r"(?:global|buffer|flat)_store_\w+"}


def assembly_of(variant, target):
    made = compiled(variant, TARGETS[target])
    return made, made.asm["ptx" if target == "sm_90" else "amdgcn"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("to_pages", [False, True])
@pytest.mark.parametrize("page_bytes", [65_536, 8_192, 73_728])
def test_opaque_pages_move_16_bytes_at_a_time(target, to_pages, page_bytes):
    _, assembly = assembly_of(CopyVariant(page_bytes, 16, to_pages=to_pages), target)
    assert re.search(WIDE[target], " ".join(re.findall(LOADS[target], assembly)))
    stores = re.findall(STORES[target], assembly)
    assert stores
    assert all(re.search(WIDE[target], store) for store in stores)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("to_pages", [False, True])
@pytest.mark.parametrize(("tokens", "head_bytes"), [(16, 256), (64, 256), (16, 192)])
def test_heads_move_16_bytes_at_a_time(target, to_pages, tokens, head_bytes):
    variant = ConvertVariant(tokens, head_bytes, 16, to_pages=to_pages)
    _, assembly = assembly_of(variant, target)
    assert re.search(WIDE[target], " ".join(re.findall(LOADS[target], assembly)))
    stores = re.findall(STORES[target], assembly)
    assert stores
    assert all(re.search(WIDE[target], store) for store in stores)


def test_a_compiled_kernel_has_no_shared_memory_and_the_parameters_that_a_launch_passes():
    made, assembly = assembly_of(CopyVariant(65_536, 16, to_pages=True), "sm_90")
    assert made.metadata.shared == 0
    assert len(re.findall(r"\.param", assembly.split(")", 1)[0])) >= 9


def test_odd_sizes_compile():
    for align, page_bytes in ((1, 33), (2, 250), (4, 252)):
        assembly_of(CopyVariant(page_bytes, align, to_pages=True), "sm_90")
