"""What a phase of a measurement is given, and the rows that it may still have time for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from holdfast_bench.measure.gpu.accelerator import HostAccelerator


class Setting(NamedTuple):
    """The GPU, a folder for files, and the monotonic time at which the phase is ended.

    `rehearse`: toy sizes. A phase measures what matters most first, and leaves out what does not
    fit before its end. `rounds`: how often a figure is measured.
    """

    gpu: HostAccelerator
    folder: Path
    until_s: float
    rounds: int
    rehearse: bool

    def left_s(self) -> float:
        """Return the seconds until the phase is ended."""
        return self.until_s - time.monotonic()
