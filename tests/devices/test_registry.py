"""Devices of this package and of other installed packages, by the type of PyTorch devices."""

from importlib import metadata

import numpy as np
import pytest

from holdfast.devices import host, registry
from holdfast.devices.base import DeviceError, Pages
from holdfast.devices.host import HostDevice
from holdfast.devices.registry import DeviceKind, DeviceOptions, find_kind, open_device


def offer(monkeypatch, **offers):
    """Let installed packages offer kinds: their objects by name, or an exception to raise."""

    class Point(metadata.EntryPoint):
        def load(self):
            if isinstance(offers[self.name], Exception):
                raise offers[self.name]
            return offers[self.name]

    def entry_points(group):
        assert group == registry.ENTRY_POINTS
        return [Point(name, f"other_package:{name.upper()}", group) for name in offers]

    monkeypatch.setattr(metadata, "entry_points", entry_points)


def test_pages_in_memory_of_the_host_are_copied_by_the_host_device():
    memory = np.zeros((4, 64), np.uint8)
    pages = Pages.uniform((memory.ctypes.data,), 64, 64, 4, 1)
    device = open_device("cpu", pages, [memory], DeviceOptions())
    assert isinstance(device, HostDevice)
    assert device.pages == pages
    device.close()


def test_a_device_of_another_package_gets_pages_tensors_and_options(monkeypatch):
    got = []
    offer(monkeypatch, toy=DeviceKind(lambda *given: got.append(given) or "a device"))
    pages = Pages.uniform((8,), 64, 64, 4, 1)
    assert open_device("toy", pages, ["tensor"], DeviceOptions(step_blocks=7)) == "a device"
    assert got == [(pages, ["tensor"], DeviceOptions(7))]


def test_a_kind_of_this_package_cannot_be_replaced(monkeypatch):
    offer(monkeypatch, cpu=DeviceKind(lambda *_: "a device"))
    assert find_kind("cpu") is host.KIND


@pytest.mark.parametrize(
    ("offers", "message"),
    [
        ({}, "pages on 'toy' are not supported, only on cpu, cuda; install a package that offers"),
        ({"toy": ImportError("no libtoy")}, "TOY cannot be loaded: ImportError.'no libtoy'.; fix"),
        ({"toy": "a string"}, "other_package:TOY is of type str, not a holdfast.devices.registry"),
    ],
)
def test_a_device_that_cannot_be_opened_is_refused_with_a_remedy(monkeypatch, offers, message):
    offer(monkeypatch, **offers)
    with pytest.raises(DeviceError, match=message):
        find_kind("toy")


def test_a_kind_that_two_packages_offer_is_refused(monkeypatch):
    points = [metadata.EntryPoint("toy", f"{by}:KIND", registry.ENTRY_POINTS) for by in "ab"]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    with pytest.raises(DeviceError, match="offered by a:KIND, b:KIND; uninstall all but one"):
        find_kind("toy")
