"""The device kind `cuda`: GPUs of NVIDIA, and those of AMD, which PyTorch names `cuda`, too."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.devices.base import DeviceError, DirectDevice, Pages, StagingDevice
from holdfast.devices.registry import DeviceKind, DeviceOptions

if TYPE_CHECKING:
    from holdfast.devices.cuda.device import CudaDevice

_log = logging.getLogger(__name__)


def _open(
    pages: Pages, tensors: Sequence[Any], options: DeviceOptions
) -> DirectDevice | StagingDevice:
    """Return a device that uses NVIDIA's driver; elsewhere, and if that fails, one of PyTorch."""
    import torch

    from holdfast.devices.cuda.torch_device import TorchDevice

    if torch.version.hip is None and importlib.util.find_spec("triton") is not None:
        try:
            return _on_nvidia(pages, tensors, options)
        except Exception as error:  # the driver's, or those of Triton's compiler
            if options.portable is not None:
                raise DeviceError(
                    f"the GPU cannot convert portable blocks: {error}; choose the layout `exact`"
                ) from error
            _log.warning("blocks are copied through PyTorch, several times slower: %s", error)
    if options.portable is not None:
        raise DeviceError(
            "portable blocks need Triton and a GPU of NVIDIA; choose the layout `exact`"
        )
    return TorchDevice(tensors, pages)


def _on_nvidia(pages: Pages, tensors: Sequence[Any], options: DeviceOptions) -> CudaDevice:
    import torch

    from holdfast.devices.cuda.device import CudaDevice
    from holdfast.devices.cuda.libcuda import CudaDriver

    gpu = tensors[0].device
    with torch.cuda.device(gpu):
        torch.cuda.current_stream(gpu).synchronize()  # makes its context current here
        driver = CudaDriver(lambda: int(torch.cuda.current_stream(gpu).cuda_stream))
        try:
            return CudaDevice(driver, pages, options, tensors)
        except BaseException:
            driver.close()
            raise


KIND = DeviceKind(_open, converts=True)
