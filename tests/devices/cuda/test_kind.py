import importlib.util

import numpy as np
import pytest

pytest.importorskip("torch")

from holdfast.blocks.layout import Layout
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import DeviceError, Pages
from holdfast.devices.cuda import kind
from holdfast.devices.driver import DriverError
from holdfast.devices.page_format import latent_format
from holdfast.devices.registry import DeviceOptions


def test_portable_blocks_are_refused_with_the_drivers_reason(monkeypatch, caplog):
    def fail(*_):
        raise DriverError("cuMemAlloc_v2: error 2, out of memory")

    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)
    monkeypatch.setattr(kind, "_on_nvidia", fail)
    memory = np.zeros((1, 2, 8 * 24 * 2), np.uint8)
    pages = Pages.uniform((memory.ctypes.data,), memory.shape[2], memory.shape[2], 2, 1)
    layout = Layout.portable_latent(layers=1, latent_size=24, dtype="bfloat16", block_tokens=8)
    portable = PortablePages(latent_format(8, 24, 2), layout.whole())
    with pytest.raises(DeviceError, match="out of memory; choose the layout `exact`"):
        kind.KIND.open(pages, [memory], DeviceOptions(1, portable))
    assert not caplog.records
