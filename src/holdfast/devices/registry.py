"""Kinds of devices: this package's, and those of other installed packages.

Another package registers a kind in the entry point group `holdfast.devices`. The entry point's name
is the type of PyTorch devices that it copies from and to, such as `xpu`; its object is a
`DeviceKind`. A kind of this package has the name first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import DeviceError, DirectDevice, Pages, StagingDevice
from holdfast.installed import find_installed

ENTRY_POINTS = "holdfast.devices"

BUILT_IN = {"cpu": "holdfast.devices.host", "cuda": "holdfast.devices.cuda.kind"}
"""Modules of this package's kinds, each with a `KIND`, by the type of PyTorch devices."""


class DeviceOptions(NamedTuple):
    """What an engine tells a device.

    `step_blocks`: the most blocks of pages that one of its steps can fill; 0: not known.
    `portable`: how pages and portable blocks are converted; None: blocks are whole pages.
    """

    step_blocks: int = 0
    portable: PortablePages | None = None


class DeviceKind(NamedTuple):
    """A kind of device.

    `open` takes the pages, the tensors that own their memory (one a layer), and the engine's
    options. It raises HoldfastError if it cannot copy them; the engine then has no cache.
    `converts`: whether it opens devices for portable blocks, with `DeviceOptions.portable`.
    """

    open: Callable[[Pages, Sequence[Any], DeviceOptions], DirectDevice | StagingDevice]
    converts: bool = False


def open_device(
    name: str, pages: Pages, tensors: Sequence[Any], options: DeviceOptions
) -> DirectDevice | StagingDevice:
    """Return the device for pages in tensors of one type of PyTorch devices.

    Raises DeviceError for a type that no kind copies, for a kind that cannot be loaded, and for
    portable blocks if the kind does not convert pages.
    """
    kind = find_kind(name)
    if options.portable is not None and not kind.converts:
        raise DeviceError(
            f"pages on {name!r} cannot be converted to portable blocks yet; choose the layout "
            "`exact`"
        )
    return kind.open(pages, tensors, options)


def find_kind(name: str) -> DeviceKind:
    """Return the kind for a type of PyTorch devices; raise DeviceError if there is none."""
    if name in BUILT_IN:
        built_in: DeviceKind = import_module(BUILT_IN[name]).KIND
        return built_in
    kind = find_installed(ENTRY_POINTS, name, DeviceKind, f"device kind {name!r}", DeviceError)
    if kind is None:
        raise DeviceError(
            f"pages on {name!r} are not supported, only on {', '.join(sorted(BUILT_IN))}; install "
            f"a package that offers {name!r} in the entry point group {ENTRY_POINTS!r}"
        )
    return kind
