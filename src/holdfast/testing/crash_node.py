"""kill -9 of whole nodes with an engine writing to them: at failpoints, or at any moment."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml

from holdfast.codec.pack import payload
from holdfast.errors import NodeGoneError, ProtocolError, RefusedError
from holdfast.limits import MIB
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.contexts import BLOCK_TOKENS, FINGERPRINT, chain_of, check_payload
from holdfast.testing.payloads import payload_of
from holdfast.tiers.base import NOWHERE
from holdfast.wire.address import socket_path
from holdfast.wire.client import Client
from holdfast.wire.messages import (
    PROTOCOL,
    Commit,
    Fetch,
    Fetched,
    Hello,
    Release,
    Report,
    Request,
    Reserve,
    Reserved,
    Status,
)

PAYLOAD_BYTES = 20_000
CHAIN_BLOCKS = 8
CHAINS_KEPT = 60
POINTS = ("extent_write", "region_seal", "region_sealed", "commit_packed", "commit_published",
          "descent_written", "region_header")  # fmt: skip
"""Those that an engine's saving makes a node pass."""

PASSES_MAX = 5
POINTS_PROVEN_AT = 8
"""With so many cycles a point, every point must have killed."""

_READY_S = 60.0
_ANSWER_S = 20.0
_MOMENT_S = 0.12
_POINT_S = 20.0
"""Until a point that is armed is passed, by a node that writes all the time."""

_STARTING_S = 0.5


R = TypeVar("R")


class Engine:
    """A client that saves and reads chains, and checks every byte it reads."""

    def __init__(self, address: str) -> None:
        hello = Hello(PROTOCOL, "campaign", FINGERPRINT, PAYLOAD_BYTES, BLOCK_TOKENS)
        self._client = Client(address, hello, _ANSWER_S)

    def save(self, keys: Sequence[bytes]) -> None:
        """Save a chain."""
        reserved = self._ask(Reserve(b"".join(keys), FINGERPRINT, 0), Reserved)
        for key, place in zip(keys, reserved.places, strict=True):
            if place != NOWHERE:
                self._slot(place)[:] = payload_of(key, PAYLOAD_BYTES)
        self._client.call(Commit(reserved.ticket), _ANSWER_S)

    def read(self, keys: Sequence[bytes]) -> int:
        """Fetch a chain, check every byte, release; return how many blocks landed."""
        fetched = self._ask(Fetch(b"".join(keys), 10.0), Fetched)
        for key, place in zip(keys, fetched.places, strict=False):
            check_payload(key, self._slot(place))
        if fetched.lease:
            self._client.call(Release(fetched.lease), _ANSWER_S)
        return len(fetched.places)

    def await_recovery(self) -> None:
        """Wait until the node has found what earlier lives left."""
        end = time.monotonic() + _READY_S
        while self._ask(Status(), Report).data["recovery_s"] is None:
            if time.monotonic() > end:
                raise AssertionError(f"recovery did not end within {_READY_S:g} s")
            time.sleep(0.01)

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _ask(self, request: Request, kind: type[R]) -> R:
        reply = self._client.call(request, _ANSWER_S)
        if not isinstance(reply, kind):
            raise ProtocolError(f"the node answered {reply!r}")
        return reply

    def _slot(self, place: int) -> memoryview:
        arena = self._client.arena
        if arena is None:
            raise ProtocolError("the node lent no arena")
        return payload(arena.view[place:], PAYLOAD_BYTES)


class Ending(NamedTuple):
    """How a node ended: its status as `Popen` says it, and whether it was there to be killed."""

    status: int
    by_itself: bool


class NodeProcess:
    """`holdfast serve` in a folder, started with a failpoint and killed at will.

    Raises ConfigError if the folder's name is too long for a socket in it.
    """

    def __init__(self, folder: Path) -> None:
        self.address = f"unix://{folder}/node.sock"
        socket_path(self.address)  # refused here, and not by every node that is started
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "node.yaml"
        self._log = folder / "node.log"
        host = {"kind": "host", "capacity": 32 * MIB}
        disk = {"kind": "disk", "path": f"{folder}/disk", "capacity": 16 * MIB, "region": MIB}
        self._file.write_text(yaml.safe_dump({"listen": self.address, "tiers": [host, disk]}))
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: Ending | None = None
        self._pipe = os.pipe()
        """It ends when the second end closes: with us, whatever becomes of us."""

    def start(self, failpoint: str = "") -> None:
        """Start; `serving` tells when it is there, if it ever is."""
        setting = [f"HOLDFAST_FAILPOINT={failpoint}"] if failpoint else []
        argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(self._file)]
        self._ending, theirs = None, self._pipe[0]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["/usr/bin/env", *setting, *argv, "--with-parent", str(theirs)],
                pass_fds=[theirs],
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # an interrupt at the terminal is for who counts, not for the node
            )

    def serving(self) -> bool:
        """Wait until it serves; False if it ended before that."""
        if self._process is None or self._process.stdout is None:
            return False
        ready, _, _ = select.select([self._process.stdout], [], [], _READY_S)
        return bool(ready) and os.read(self._process.stdout.fileno(), 5) == b"READY"

    def await_end(self, seconds: float) -> None:
        """Wait until it ends by itself, for so long at most."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def kill(self) -> Ending:
        """Kill it, if it still lives; return how it ended, each time that it is asked."""
        if self._process is None:
            return Ending(0, by_itself=True)
        if self._ending is None:
            by_itself = self._process.poll() is not None
            self._process.kill()
            self._ending = Ending(self._process.wait(), by_itself)
            if self._process.stdout is not None:
                self._process.stdout.close()
        return self._ending

    def close(self) -> None:
        """End it for good."""
        self.kill()
        for end in self._pipe:
            os.close(end)


def kill_nodes(order: Order) -> Tally:
    """Start, read everything, write until killed, again."""
    tally = Tally("crash.node", "kills")
    with contextlib.closing(NodeProcess(order.folder / "crash-node")) as node:
        cycles = _cycles(order, tally, node)
    read = tally.counts["blocks read and right"]
    read_most = read >= tally.tried * CHAIN_BLOCKS
    order.expect_enough(tally, read_most, f"{read} blocks read: too few to tell")
    if cycles >= POINTS_PROVEN_AT * len(POINTS):
        for point in POINTS:
            killed = tally.counts[f"at {point}"]
            order.expect_enough(tally, killed, f"failpoint {point} never killed")
    return tally


def _cycles(order: Order, tally: Tally, node: NodeProcess) -> int:
    """Let a node live and end as often as ordered; return how often."""
    kept: list[list[bytes]] = []
    cycles = 0
    for cycle, dice in enumerate(order.rounds(tally)):
        point = _point(cycle)
        node.start(f"{point}:{dice.randint(1, PASSES_MAX)}" if point else "")
        moment = "at any moment"
        if cycle % 8 == 7:  # noqa: PLR2004 - now and then it is killed while it starts
            time.sleep(dice.uniform(0, _STARTING_S))
            moment = "while starting"
        else:
            after_s = _POINT_S if point else dice.uniform(0, _MOMENT_S)
            _one_life(tally, node, kept, cycle, after_s)
        _count(tally, f"cycle {cycle}", point, moment, node.kill())
        cycles += 1
    return cycles


def _point(cycle: int) -> str:
    """Return the point that ends a cycle, each in its turn; "" where a moment does."""
    group, at = divmod(cycle, 8)
    return POINTS[(3 * group + at // 2) % len(POINTS)] if at in {1, 3, 5} else ""


def _count(tally: Tally, where: str, point: str, moment: str, ending: Ending) -> None:
    """Count who ended a node: a failpoint, or this campaign; anything else is wrong."""
    killed = ending.status == -signal.SIGKILL
    tally.expect(killed, f"{where}: the node ended by itself, with {ending.status}; see its log")
    if killed and ending.by_itself:
        tally.expect(point, f"{where}: somebody else killed the node")
    tally.tried += killed
    tally.counts[f"at {point or 'nobody knows what'}" if ending.by_itself else moment] += 1


def _one_life(
    tally: Tally, node: NodeProcess, kept: list[list[bytes]], cycle: int, after_s: float
) -> None:
    """Read what earlier lives left, and write on until the node dies, or is killed."""
    if not node.serving():
        node.await_end(_ANSWER_S)  # it says nothing more some time before it is gone
        tally.expect(node.kill().by_itself, f"cycle {cycle}: no start within {_READY_S:g} s")
        return
    engine = None
    try:
        engine = Engine(node.address)
        engine.await_recovery()
        tally.counts["blocks read and right"] += sum(map(engine.read, kept))
        _write_until_killed(node, engine, kept, cycle, after_s)
    except (NodeGoneError, RefusedError) as error:
        node.await_end(_ANSWER_S)  # a failpoint: what a dead node does not answer is computed
        tally.expect(node.kill().by_itself, f"cycle {cycle}: it lives, and says {error!r:.200}")
    except AssertionError as error:
        tally.fail(f"cycle {cycle}: {error}")
    with contextlib.suppress(Exception):  # a dead node's session ends anyhow
        if engine is not None:
            engine.close()


def _write_until_killed(
    node: NodeProcess, engine: Engine, kept: list[list[bytes]], cycle: int, after_s: float
) -> None:
    def write() -> None:
        with contextlib.suppress(NodeGoneError, RefusedError):
            for number in range(1_000_000):
                kept.append(chain_of(f"node/{cycle}/{number}", CHAIN_BLOCKS))
                del kept[:-CHAINS_KEPT]
                engine.save(kept[-1])

    writer = threading.Thread(target=write, name="campaign-writer")
    writer.start()
    node.await_end(after_s)
    node.kill()
    writer.join(_ANSWER_S)
    if writer.is_alive():
        raise AssertionError("a save to a killed node did not end")
