"""The device kind `cuda`: GPUs of NVIDIA, and those of AMD, which PyTorch names `cuda`, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.devices.base import DirectDevice, Pages
from holdfast.devices.registry import DeviceKind, DeviceOptions


def _open(pages: Pages, tensors: Sequence[Any], options: DeviceOptions) -> DirectDevice:
    """Return the device for these pages."""
    from holdfast.devices.cuda.torch_device import TorchDevice

    del options
    return TorchDevice(tensors, pages)


KIND = DeviceKind(_open)
