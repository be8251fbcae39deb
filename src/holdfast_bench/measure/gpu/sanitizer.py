"""Both kernels under NVIDIA's compute-sanitizer, which finds accesses outside allocated memory.

It is installed with the CUDA toolkit, not with the driver or PyTorch. This file, run as a program,
is what it watches; a rehearsal runs that without it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.report import Row, not_measured
from holdfast_bench.harness.process import TAIL_LINES
from holdfast_bench.measure.gpu.accelerator import accelerator
from holdfast_bench.measure.gpu.conversion import ConvertedPages
from holdfast_bench.measure.gpu.kernels import KernelPages
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import FUSED_TOY, TOY

PROGRAM = "holdfast_bench.measure.gpu.sanitizer"
SANITIZER = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin",)
"""Where the toolkit has it, if it is not on the path."""

TOOLS = ("memcheck", "racecheck", "initcheck")
BLOCKS = 3
FAILED = 86
"""Exit status for a finding, which the program itself never has."""


def rows(setting: Setting) -> Iterator[Row]:
    """Yield whether each tool of the sanitizer found nothing in both kernels."""
    program = [sys.executable, "-m", PROGRAM, *(["--rehearse"] if setting.rehearse else [])]
    if setting.rehearse:
        _run(setting, program)
        yield Row("gpu.sanitizer.rehearsed", 1.0, "runs")
        return
    found = sanitizer()
    if found is None:
        yield not_measured("gpu.sanitizer", f"{SANITIZER} is not installed")
        return
    for tool in TOOLS:
        _run(setting, [found, "--tool", tool, "--error-exitcode", str(FAILED), *program])
        yield Row(f"gpu.sanitizer.{tool}", 0.0, "findings", {"gpu": setting.gpu.name()}, ok=True)


def sanitizer() -> str | None:
    """Return the path of the sanitizer; None if it is not installed."""
    places = [Path(place) / SANITIZER for place in PLACES]
    return shutil.which(SANITIZER) or next((str(file) for file in places if file.exists()), None)


def _run(setting: Setting, argv: Sequence[str]) -> None:
    """Run a program to its end; raise HoldfastError if it fails, with the end of its output."""
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=max(1.0, setting.left_s()), check=False
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()[-TAIL_LINES:]
        raise HoldfastError(f"{argv[0]} ended with {done.returncode}: " + "\n".join(lines))


def main(argv: Sequence[str]) -> int:
    """Run both kernels in both directions, and compare their bytes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearse", action="store_true")
    gpu = accelerator(rehearse=parser.parse_args(argv).rehearse)
    with closing(KernelPages(gpu, TOY, BLOCKS)) as pages:
        pages.verify()
    with closing(ConvertedPages(gpu, FUSED_TOY, BLOCKS)) as converted:
        converted.verify()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
