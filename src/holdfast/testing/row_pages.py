"""Engine pages for tests: the rows of an array, one page of one layer for each block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.devices.base import Pages
from holdfast.devices.host import HostDevice


class RowPages:
    """A small engine's memory: `rows[page]` are the bytes of a page; a block is one page."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self.rows: npt.NDArray[np.uint8] = np.zeros((count, page_bytes), np.uint8)
        address = self.rows.ctypes.data
        pages = Pages.uniform((address,), page_bytes, page_bytes, count, pages_per_block=1)
        self.device = HostDevice(pages, keep=self.rows)

    def close(self) -> None:
        """Stop the device's threads."""
        self.device.close()
