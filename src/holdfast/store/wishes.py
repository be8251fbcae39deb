"""What is known of the future: whose contexts are whose, what is to be brought up, what is pinned.

State only, under the store's lock. Everything is bounded, and what is forgotten costs a hint.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.world import World
from holdfast.limits import MIB

SESSIONS_MAX = 65_536
KEYS_BYTES_MAX = 64 * MIB
"""Keys of followed sessions together; the session used longest ago is forgotten beyond."""

WAITING_MAX = 4_096
"""Contexts waiting to be brought up; their keys together are bounded by `KEYS_BYTES_MAX` too."""

BEGUN_MAX = 64
"""Contexts whose time has come and that are not up yet; the others wait a little longer."""


class Chain(NamedTuple):
    """A chain by name: its world, and its keys, 16 bytes each."""

    world: World
    keys: bytes

    def split(self) -> list[bytes]:
        """Return the keys one by one."""
        return [self.keys[i : i + KEY_BYTES] for i in range(0, len(self.keys), KEY_BYTES)]


class Staging(NamedTuple):
    """A chain to be brought up, and when it is needed, in seconds of the store's clock."""

    chain: Chain
    needed_s: float


class Pin(NamedTuple):
    """A chain that stays in memory until then, by the store's clock; the lease that keeps it."""

    until_s: float
    nbytes: int
    lease: int


class Wishes:
    """Sessions by domain and name, and a queue of contexts by when to bring them up."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[bytes, str], Chain] = OrderedDict()
        self._keys_bytes = 0
        self._waiting: list[tuple[float, int, Staging]] = []
        self._waiting_bytes = 0
        self._begun = 0
        self._numbers = 0
        self._pins: dict[tuple[World, bytes], Pin] = {}
        """By the last block's key, which names all in front of it as well."""
        self._claims: dict[int, int] = {}

    def follow(self, world: World, session: str, keys: Sequence[bytes]) -> None:
        """Note the chain that a session used last; a shorter beginning of it changes nothing."""
        name, packed = (world.domain, session), b"".join(keys)
        known = self._sessions.pop(name, None)
        if known is not None:
            self._keys_bytes -= len(known.keys)
            if known.world == world and known.keys.startswith(packed):
                packed = known.keys
        self._sessions[name] = Chain(world, packed)
        self._keys_bytes += len(packed)
        while len(self._sessions) > SESSIONS_MAX or self._keys_bytes > KEYS_BYTES_MAX:
            _, oldest = self._sessions.popitem(last=False)
            self._keys_bytes -= len(oldest.keys)

    def chain(self, domain: bytes, session: str) -> Chain | None:
        """Return what a session used last; None for one that is not known."""
        return self._sessions.get((domain, session))

    def forget(self, domain: bytes, session: str) -> None:
        """Stop following a session."""
        known = self._sessions.pop((domain, session), None)
        if known is not None:
            self._keys_bytes -= len(known.keys)

    def wait(self, at_s: float, staging: Staging) -> bool:
        """Have a chain brought up at `at_s` of the store's clock; False if too many wait."""
        nbytes = self._waiting_bytes + len(staging.chain.keys)
        if len(self._waiting) >= WAITING_MAX or nbytes > KEYS_BYTES_MAX:
            return False
        self._waiting_bytes = nbytes
        self._numbers += 1
        heapq.heappush(self._waiting, (at_s, self._numbers, staging))
        return True

    def due(self, now_s: float) -> list[Staging]:
        """Take the chains whose time has come; the caller says of each when it is `done`."""
        ready: list[Staging] = []
        while self._waiting and self._waiting[0][0] <= now_s and self._begun < BEGUN_MAX:
            ready.append(heapq.heappop(self._waiting)[2])
            self._waiting_bytes -= len(ready[-1].chain.keys)
            self._begun += 1
        return ready

    def done(self) -> None:
        """Note that a chain that was due is up, or will not be."""
        self._begun -= 1

    def claim(self, nbytes: int) -> int:
        """Count bytes as pinned that are about to be; return a number for `end_claim`."""
        self._numbers += 1
        self._claims[self._numbers] = nbytes
        return self._numbers

    def end_claim(self, number: int) -> None:
        """Count what was claimed no longer."""
        del self._claims[number]

    def pin(self, world: World, last: bytes, pin: Pin) -> None:
        """Note that the chain up to a block is pinned."""
        self._pins[world, last] = pin

    def pins_within(self, world: World, keys: Sequence[bytes]) -> dict[bytes, Pin]:
        """Return the pins of a chain and of its beginnings, by the last block of each."""
        return {key: pin for key in keys if (pin := self._pins.get((world, key))) is not None}

    def unpin(self, world: World, last: bytes) -> None:
        """Note that the chain up to a block is not pinned any more, or as part of a longer one."""
        del self._pins[world, last]

    def pinned_bytes(self, now_s: float) -> int:
        """Return how many bytes are pinned, or about to be."""
        self._pins = {chain: pin for chain, pin in self._pins.items() if pin.until_s > now_s}
        return sum(pin.nbytes for pin in self._pins.values()) + sum(self._claims.values())

    def status(self, now_s: float) -> dict[str, int]:
        """Return how many sessions are followed, contexts wait, and bytes are pinned."""
        return {
            "sessions": len(self._sessions),
            "prestaging": len(self._waiting),
            "pinned_bytes": self.pinned_bytes(now_s),
        }
