"""Page-lock memory through PyTorch's runtime of a GPU: CUDA's, or HIP's for GPUs of AMD.

A call of the runtime that fails leaves its error pending in its thread, where the next operation of
PyTorch raises it. So the calls are made on a thread of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.devices.base import DeviceError
from holdfast.workers import workers

_PORTABLE = 1
"""`cudaHostRegisterPortable`: for every context of the process."""


class RuntimeRegistrar:
    """A `Registrar` of one GPU. Raises DeviceError if the runtime refuses a call."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._thread = workers(1, "holdfast-register")

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory of this process."""
        self._thread.submit(self._call, "cudaHostRegister", address, nbytes, _PORTABLE).result()

    def unregister(self, address: int) -> None:
        """Unlock the memory that was locked at an address."""
        self._thread.submit(self._call, "cudaHostUnregister", address).result()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True)

    def _call(self, name: str, *arguments: int) -> None:
        with torch.cuda.device(self._device):
            result = int(getattr(torch.cuda.cudart(), name)(*arguments))
        if result:
            raise DeviceError(f"{name}: error {result}")
