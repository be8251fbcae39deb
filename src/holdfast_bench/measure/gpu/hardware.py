"""Phase 0: the GPU, its driver and its link, and what decides how memory can be locked."""

from __future__ import annotations

import ctypes
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from holdfast.limits import GIB
from holdfast.report import Row
from holdfast_bench.measure.gpu.setting import Setting

ATTRIBUTES = {
    "pageable_memory_access": 88,
    "host_pointers_for_registered": 91,
    "host_page_tables": 100,
    "unified_addressing": 41,
    "copy_engines": 40,
}
"""Numbers of `CUdevice_attribute` in cuda.h."""

QUERY = (
    "driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,persistence_mode"
)
QUERY_S = 10.0
WHY_CHARS_MAX = 200

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def rows(setting: Setting) -> Iterator[Row]:
    """Yield one row: the memory of the GPU, and with it what is known of the machine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    more: dict[str, object] = {
        "gpu": setting.gpu.name(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "memlock_bytes": soft,
        **{
            f"huge_pages_{name}": _chosen(_HUGE_PAGES / name)
            for name in ("enabled", "shmem_enabled")
        },
        **smi(),
        **attributes(),
    }
    yield Row("gpu.memory", setting.gpu.memory_bytes() / GIB, "GiB", more)


def smi() -> dict[str, object]:
    """Return what `nvidia-smi` says of the first GPU; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    argv = [program, f"--query-gpu={QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(argv, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia_smi": str(error)[-WHY_CHARS_MAX:]}
    return dict(zip(QUERY.split(","), found.stdout.strip().split(", "), strict=False))


def attributes(library: str = "libcuda.so.1") -> dict[str, object]:
    """Return attributes of the first GPU by the driver; empty without a driver."""
    try:
        cuda = ctypes.CDLL(library)
        cuda.cuInit(0)
    except (OSError, AttributeError):
        return {}
    found: dict[str, object] = {}
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int(-1)
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0) == 0:
            found[name] = value.value
    return found


def _chosen(file: Path) -> str:
    """Return the word in brackets of a file of choices: `always [madvise] never`."""
    try:
        return file.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
