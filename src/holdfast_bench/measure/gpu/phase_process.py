"""The process of one phase: measures, and appends each row to a file as soon as it has it."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO

import msgspec
import torch

from holdfast_bench.measure.gpu.accelerator import accelerator
from holdfast_bench.measure.gpu.phases import WHY_CHARS_MAX, PhaseEnd, PhaseLine
from holdfast_bench.measure.gpu.setting import Setting

SPARE_S = 2.0
"""Time before the limit at which a phase begins nothing more."""


def main(argv: Sequence[str]) -> int:
    """Run the phase whose module `argv` names; what it raises ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("file", type=Path)
    parser.add_argument("limit_s", type=float)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--no-gpu", action="store_true")
    args = parser.parse_args(argv)
    until_s = time.monotonic() + args.limit_s - SPARE_S
    with (
        args.file.open("ab", buffering=0) as file,
        tempfile.TemporaryDirectory(dir=args.file.parent) as folder,
    ):
        try:
            if args.rehearse:  # a second thread costs more than it saves at toy sizes
                torch.set_num_threads(1)
            gpu = accelerator(rehearse=args.rehearse or args.no_gpu)
            setting = Setting(gpu, Path(folder), until_s, args.rounds, args.rehearse)
            for row in import_module(args.module).rows(setting):
                _append(file, PhaseLine(row=row))
        except Exception as error:
            _append(
                file, PhaseLine(end=PhaseEnd(f"{type(error).__name__}: {error}"[:WHY_CHARS_MAX]))
            )
            raise
        _append(file, PhaseLine(end=PhaseEnd("")))
    return 0


def _append(file: IO[bytes], line: PhaseLine) -> None:
    file.write(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
