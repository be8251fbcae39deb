"""kill -9 of whole nodes with an engine writing to them: at failpoints, or at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from holdfast.codec.pack import payload
from holdfast.errors import NodeGoneError, ProtocolError, RefusedError
from holdfast.limits import MIB
from holdfast.testing.campaign import Order, Tally
from holdfast.testing.contexts import BLOCK_TOKENS, FINGERPRINT, chain_of, check_payload
from holdfast.testing.payloads import payload_of
from holdfast.tiers.base import NOWHERE
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

_READY_S = 60.0
_ANSWER_S = 20.0
_MOMENT_S = 0.12
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


class NodeProcess:
    """`holdfast serve` in a folder, started with a failpoint and killed at will."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"unix://{folder}/node.sock"
        self._file = folder / "node.yaml"
        self._log = folder / "node.log"
        host = {"kind": "host", "capacity": 32 * MIB}
        disk = {"kind": "disk", "path": f"{folder}/disk", "capacity": 16 * MIB, "region": MIB}
        self._file.write_text(yaml.safe_dump({"listen": self.address, "tiers": [host, disk]}))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, failpoint: str = "") -> None:
        """Start; `serving` tells when it is there, if it ever is."""
        setting = [f"HOLDFAST_FAILPOINT={failpoint}"] if failpoint else []
        argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(self._file)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["/usr/bin/env", *setting, *argv], stdout=subprocess.PIPE, stderr=log
            )

    def serving(self) -> bool:
        """Wait until it serves; False if it ended before that."""
        if self._process is None or self._process.stdout is None:
            return False
        ready, _, _ = select.select([self._process.stdout], [], [], _READY_S)
        return bool(ready) and os.read(self._process.stdout.fileno(), 5) == b"READY"

    def kill(self) -> int:
        """Kill it, if it still lives; return how it ended, as `Popen` says it."""
        if self._process is None:
            return 0
        self._process.kill()
        status = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process is not None and self._process.poll() is not None


def kill_nodes(order: Order) -> Tally:
    """Start, read everything, write until killed, again."""
    tally = Tally("crash.node", "kills")
    node = NodeProcess(order.folder / "crash-node")
    kept: list[list[bytes]] = []
    for cycle, dice in enumerate(order.rounds(tally)):
        point = dice.choice(POINTS) + f":{dice.randrange(1, 12)}" if cycle % 2 else ""
        node.start(point)
        if cycle % 8 == 7:  # noqa: PLR2004 - now and then it is killed while it starts
            time.sleep(dice.uniform(0, _STARTING_S))
            tally.expect(node.kill() in _ENDS, f"cycle {cycle}: a start failed; see its log")
            tally.counts["while starting"] += 1
        else:
            _one_life(tally, node, kept, dice)
        tally.tried += 1
    node.kill()
    read = tally.counts["blocks read and right"]
    tally.expect(read >= tally.tried * CHAIN_BLOCKS, f"{read} blocks read: too few to tell")
    return tally


_ENDS = (0, -signal.SIGKILL)


def _one_life(
    tally: Tally, node: NodeProcess, kept: list[list[bytes]], dice: random.Random
) -> None:
    """Read what earlier lives left, write on, die."""
    cycle = tally.tried
    if not node.serving():
        tally.expect(node.kill() == -signal.SIGKILL, f"cycle {cycle}: the node did not start")
        tally.counts["at a failpoint"] += 1
        return
    engine = None
    try:
        engine = Engine(node.address)
        engine.await_recovery()
        tally.counts["blocks read and right"] += sum(map(engine.read, kept))
        _write_until_killed(node, engine, kept, cycle, dice)
    except (NodeGoneError, RefusedError):
        pass  # a failpoint: what a dead node does not answer is computed
    except AssertionError as error:
        tally.fail(f"cycle {cycle}: {error}")
    with contextlib.suppress(Exception):  # a dead node's session ends anyhow
        if engine is not None:
            engine.close()
    tally.counts["at a failpoint" if node.ended else "at any moment"] += 1
    tally.expect(node.kill() == -signal.SIGKILL, f"cycle {cycle}: the node ended by itself")


def _write_until_killed(
    node: NodeProcess, engine: Engine, kept: list[list[bytes]], cycle: int, dice: random.Random
) -> None:
    def write() -> None:
        with contextlib.suppress(NodeGoneError, RefusedError):
            for number in range(1_000_000):
                kept.append(chain_of(f"node/{cycle}/{number}", CHAIN_BLOCKS))
                del kept[:-CHAINS_KEPT]
                engine.save(kept[-1])

    writer = threading.Thread(target=write, name="campaign-writer")
    writer.start()
    time.sleep(dice.uniform(0, _MOMENT_S))
    ended = node.ended
    if not ended:
        node.kill()
    writer.join(_ANSWER_S)
    if writer.is_alive():
        raise AssertionError("a save to a killed node did not end")
