"""An engine's pages, a device on a simulated driver, and an arena, for tests of the device."""

import numpy as np

from holdfast.devices.base import LayerPages, Pages
from holdfast.devices.cuda.device import CudaDevice
from holdfast.devices.registry import DeviceOptions
from holdfast.testing.page_locks import TestLocks
from holdfast.testing.simulated_driver import SimulatedDriver

COUNT, PER_BLOCK, SLOTS = 24, 2, 10
WIDE, NARROW = 64, 24
PAYLOAD = (3 * WIDE + 2 * NARROW) * PER_BLOCK
SLOT = PAYLOAD + 32
CHUNK = 2 * SLOT + 100
"""Not a multiple of slots, so that payloads cross the borders of locks."""


class Arena:
    def __init__(self, nbytes):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.view = memoryview(self.bytes)


class Machine:
    """An engine's pages of two sizes, a device on a simulated driver, an arena and its locks."""

    def __init__(self, seed=0, step_blocks=3):
        self.random = np.random.default_rng(seed)
        self.driver = SimulatedDriver(seed)
        self.wide = self.random.integers(0, 256, (3, COUNT, WIDE + 16), np.uint8)
        self.narrow = self.random.integers(0, 256, (2, COUNT, NARROW), np.uint8)
        groups = tuple(
            LayerPages(tuple(layer.ctypes.data for layer in layers), layers.shape[2], size)
            for layers, size in ((self.wide, WIDE), (self.narrow, NARROW))
        )
        self.pages = Pages(groups, COUNT, PER_BLOCK)
        assert self.pages.raw_bytes == PAYLOAD
        self.device = CudaDevice(self.driver, self.pages, DeviceOptions(step_blocks), self.wide)
        self.arena = Arena(-(-SLOTS * SLOT // CHUNK) * CHUNK)
        self.locks = TestLocks(self.driver, self.arena, CHUNK)

    def lock_all(self):
        for chunk in range(self.arena.nbytes // CHUNK):
            self.locks.lock(chunk)

    def block(self, ids):
        """The payload of a block that has these pages now."""
        wide = [self.wide[layer, page, :WIDE] for layer in range(3) for page in ids]
        narrow = [self.narrow[layer, page] for layer in range(2) for page in ids]
        return b"".join(part.tobytes() for part in wide + narrow)

    def payload(self, slot):
        return self.arena.bytes[slot * SLOT : slot * SLOT + PAYLOAD].tobytes()

    def fill(self, slot):
        """Put new content into a slot; return it."""
        content = self.random.integers(0, 256, PAYLOAD, np.uint8)
        self.arena.bytes[slot * SLOT : slot * SLOT + PAYLOAD] = content
        return content.tobytes()

    def overwrite(self, ids):
        """Let the engine's next work overwrite pages."""
        seed = int(self.random.integers(1 << 30))

        def work():
            new = np.random.default_rng(seed)
            self.wide[:, ids] = new.integers(0, 256, self.wide[:, ids].shape, np.uint8)
            self.narrow[:, ids] = new.integers(0, 256, self.narrow[:, ids].shape, np.uint8)

        self.driver.compute(work)

    def save(self, blocks, slots, locks):
        """Save blocks into slots; return whether the copy succeeded."""
        staged = self.device.stage(blocks)
        staged.pack()
        while not staged.ready():
            pass
        payloads = [(at, slot * SLOT) for at, slot in enumerate(slots)]
        copied = staged.copy(self.arena, payloads, locks).result()
        staged.release()
        return copied


CALLS = ("copy", "launch", "record", "wait", "pause", "query", "synchronise", "create_event")
"""Calls of a driver, each of which a test lets fail."""
