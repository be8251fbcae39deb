"""Crash campaign: kill -9 of nodes that an engine writes to, at failpoints or random times."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.address import socket_path
from holdfast.codec.pack import payload
from holdfast.errors import HoldfastError, NodeGoneError, ProtocolError, RefusedError
from holdfast.limits import BLOCK_TOKENS, MIB
from holdfast.testing.payloads import payload_of
from holdfast.tiers.base import NOWHERE
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult
from holdfast_bench.campaigns.contexts import FINGERPRINT, chain_of, check_payload
from holdfast_bench.harness.node import call, serve_argv
from holdfast_bench.harness.process import start_owned

PAYLOAD_BYTES = 20_000
CHAIN_BLOCKS = 8
CHAINS_KEPT = 60
POINTS = ("extent_write", "region_close", "region_closed", "commit_packed", "commit_published",
          "write_behind_written", "region_header")  # fmt: skip
"""The failpoints that a node passes when an engine saves."""

PASSES_MAX = 5
POINTS_PROVEN_AT = 8
"""After this many cycles for each failpoint, every failpoint must have killed a node."""

_READY_S = 60.0
_ANSWER_S = 60.0
_MOMENT_S = 0.12
_POINT_S = 20.0
"""Longest time until a node that writes all the time passes an armed failpoint."""

_STARTING_S = 0.5


class WritingEngine:
    """A client of a node that saves and reads chains, and checks every byte read."""

    def __init__(self, address: str) -> None:
        hello = m.Hello(m.PROTOCOL, "campaign", FINGERPRINT, PAYLOAD_BYTES, BLOCK_TOKENS)
        self._client = Client(address, hello, _ANSWER_S)

    def save(self, keys: Sequence[bytes]) -> None:
        reserved = call(self._client, m.Reserve(b"".join(keys), FINGERPRINT, 0), m.Reserved)
        for key, place in zip(keys, reserved.places, strict=True):
            if place != NOWHERE:
                self._slot(place)[:] = payload_of(key, PAYLOAD_BYTES)
        call(self._client, m.Commit(reserved.ticket), m.Committed)

    def read(self, keys: Sequence[bytes]) -> int:
        """Fetch a chain, check every byte and release; return the number of blocks fetched."""
        fetched = call(self._client, m.Fetch(b"".join(keys), 10.0), m.Fetched)
        for key, place in zip(keys, fetched.places, strict=False):
            check_payload(key, self._slot(place))
        if fetched.lease:
            call(self._client, m.Release(fetched.lease), m.Released)
        return len(fetched.places)

    def await_recovery(self) -> None:
        """Wait until the node has recovered the records of earlier processes."""
        end = time.monotonic() + _READY_S
        while call(self._client, m.Status(), m.ReportReply).data["recovery_s"] is None:
            if time.monotonic() > end:
                raise AssertionError(f"recovery did not end within {_READY_S:g} s")
            time.sleep(0.01)

    def close(self) -> None:
        self._client.close()

    def _slot(self, place: int) -> memoryview:
        arena = self._client.arena
        if arena is None:
            raise ProtocolError("the node mapped no arena")
        return payload(arena.view[place:], PAYLOAD_BYTES)


class ProcessEnding(NamedTuple):
    """How a node ended: the status that `Popen` returns, and whether it ended before the kill."""

    status: int
    by_itself: bool


class NodeProcess:
    """A `holdfast serve` process with its files in a folder, started with an optional failpoint.

    `serving` waits until it serves. Raises ConfigError if the folder's path is too long for a Unix
    socket in it.
    """

    def __init__(self, folder: Path, failpoint: str = "") -> None:
        self.address = f"unix://{folder}/node.sock"
        socket_path(self.address)  # raises ConfigError here, not in the node
        folder.mkdir(parents=True, exist_ok=True)
        host = {"kind": "host", "capacity": 32 * MIB}
        disk = {"kind": "disk", "path": f"{folder}/disk", "capacity": 16 * MIB, "region": MIB}
        config = {"listen": self.address, "tiers": [host, disk]}
        setting = [f"HOLDFAST_FAILPOINT={failpoint}"] if failpoint else []
        with (folder / "node.log").open("ab") as log:
            self._process = start_owned(
                ["/usr/bin/env", *setting, *serve_argv(folder / "node.yaml", config)],
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # Ctrl-C must not reach the node
            )
        assert self._process.stdout is not None, "it is a pipe"
        self._output = self._process.stdout
        self._ending: ProcessEnding | None = None

    def serving(self) -> bool:
        """Wait until the node serves; return False if it ends first or takes too long."""
        ready, _, _ = select.select([self._output], [], [], _READY_S)
        return bool(ready) and os.read(self._output.fileno(), 5) == b"READY"

    def await_end(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> ProcessEnding:
        """Kill the node if it still runs; return how it ended. May be called again."""
        if self._ending is None:
            by_itself = self._process.poll() is not None
            self._process.kill()
            self._ending = ProcessEnding(self._process.wait(), by_itself)
            self._output.close()
        return self._ending


def kill_nodes(budget: CampaignBudget) -> CampaignResult:
    """Start a node, read all kept chains, write until it is killed, and repeat."""
    result, folder = CampaignResult("crash.node", "kills"), budget.folder / "crash-node"
    kept: list[list[bytes]] = []
    cycles = 0
    for cycle, rng in enumerate(budget.rounds(result)):
        group, at = divmod(cycle, 8)
        point = POINTS[(3 * group + at // 2) % len(POINTS)] if at in {1, 3, 5} else ""
        node = NodeProcess(folder, f"{point}:{rng.randint(1, PASSES_MAX)}" if point else "")
        moment = "at any moment"
        try:
            if at == 7:  # noqa: PLR2004 - one in eight is killed during start
                time.sleep(rng.uniform(0, _STARTING_S))
                moment = "while starting"
            else:
                after_s = _POINT_S if point else rng.uniform(0, _MOMENT_S)
                _one_life(result, node, kept, cycle, after_s)
        finally:
            ending = node.kill()
        _count(result, f"cycle {cycle}", point, moment, ending)
        cycles += 1
    read = result.counts["blocks read and right"]
    read_most = read >= result.tried * CHAIN_BLOCKS
    budget.expect_enough(result, read_most, f"{read} blocks read: too few for a verdict")
    if cycles >= POINTS_PROVEN_AT * len(POINTS):
        for point in POINTS:
            killed = result.counts[f"at {point}"]
            budget.expect_enough(result, killed, f"failpoint {point} never killed")
    return result


def _count(
    result: CampaignResult, where: str, point: str, moment: str, ending: ProcessEnding
) -> None:
    """Count a node's end by cause: a failpoint or this campaign. Any other cause is a failure."""
    killed = ending.status == -signal.SIGKILL
    result.expect(killed, f"{where}: the node ended by itself, with {ending.status}; see its log")
    if killed and ending.by_itself:
        result.expect(point, f"{where}: the node was killed, but not by this campaign")
    result.tried += killed
    other = f"at {point}" if point else "by another cause"
    result.counts[other if ending.by_itself else moment] += 1


def _one_life(
    result: CampaignResult, node: NodeProcess, kept: list[list[bytes]], cycle: int, after_s: float
) -> None:
    """Read the kept chains, then write until the node ends or is killed."""
    if not node.serving():
        node.await_end(_ANSWER_S)  # its output may close before the process ends
        result.expect(node.kill().by_itself, f"cycle {cycle}: no start within {_READY_S:g} s")
        return
    engine = None
    try:
        engine = WritingEngine(node.address)
        engine.await_recovery()
        result.counts["blocks read and right"] += sum(map(engine.read, kept))
        _write_until_killed(node, engine, kept, cycle, after_s)
    except (NodeGoneError, RefusedError) as error:
        node.await_end(_ANSWER_S)  # expected if a failpoint killed the node
        result.expect(
            node.kill().by_itself, f"cycle {cycle}: a running node answered {error!r:.200}"
        )
    except AssertionError as error:
        result.fail(f"cycle {cycle}: {error}")
    with contextlib.suppress(HoldfastError, OSError):  # the node may be dead already
        if engine is not None:
            engine.close()


def _write_until_killed(
    node: NodeProcess, engine: WritingEngine, kept: list[list[bytes]], cycle: int, after_s: float
) -> None:
    errors = list[Exception]()

    def write() -> None:
        try:
            for number in range(1_000_000):
                kept.append(chain_of(f"node/{cycle}/{number}", CHAIN_BLOCKS))
                del kept[:-CHAINS_KEPT]
                engine.save(kept[-1])
        except (NodeGoneError, RefusedError):
            pass  # expected: the node was killed
        except Exception as error:  # noqa: BLE001  # raised below, by the thread that waits
            errors.append(error)

    writer = threading.Thread(target=write, name="campaign-writer")
    writer.start()
    node.await_end(after_s)
    node.kill()
    writer.join(_ANSWER_S)
    if writer.is_alive():
        raise AssertionError("a save to a killed node did not end")
    if errors:
        raise AssertionError(f"a save failed: {errors[0]!r:.200}")
