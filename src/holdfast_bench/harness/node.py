"""A real node on this machine: a `holdfast serve` process that benches start and kill."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import yaml

from holdfast.errors import HoldfastError, NodeGoneError
from holdfast.limits import GIB
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast_bench.harness.process import ChildProcess, wait_until

HOST_BYTES = 2 * GIB
DISK_BYTES = 4 * GIB
READY_S = 60.0
DURABLE_S = 60.0
ANSWER_S = 60.0

T = TypeVar("T")


def call(client: Client, request: m.Request, kind: type[T]) -> T:
    """Send a request and return its reply, as `Client.call` does, with `ANSWER_S`."""
    return client.call(request, kind, ANSWER_S)


def serve_argv(file: Path, settings: Mapping[str, object]) -> list[str]:
    """Write a node's configuration to a file; return the command that serves it."""
    file.write_text(yaml.safe_dump(dict(settings)))
    return [sys.executable, "-m", "holdfast", "serve", "--config", str(file)]


class NodeUnderTest:
    """A node with a host tier and a disk tier in `folder`; the constructor returns when it serves.

    `settings` override its configuration. `also` is a further address to listen on, for other
    nodes; `inside` is a command prefix, see `holdfast_bench.harness.network.Host`.
    """

    def __init__(
        self,
        folder: Path,
        host_bytes: int = HOST_BYTES,
        disk_bytes: int = DISK_BYTES,
        *,
        settings: Mapping[str, object] | None = None,
        also: str = "",
        inside: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"unix://{folder}/node.sock"
        self._log = folder / "node.log"
        tiers = [
            {"kind": "host", "capacity": host_bytes},
            {"kind": "disk", "path": str(folder / "disk"), "capacity": disk_bytes},
        ]
        listen = [self.address, also] if also else self.address
        config = {"listen": listen, "tiers": tiers, **(settings or {})}
        self._argv = [*inside, *serve_argv(folder / "node.yaml", config)]
        self.start()

    def start(self) -> None:
        """Start the process; return when it serves."""
        self.process = ChildProcess("the node", self._argv, self._log, {})
        try:
            wait_until(self.process, self._ready, READY_S)
        except BaseException:
            self.process.kill()
            raise

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash does."""
        self.process.kill()

    def restart(self) -> None:
        """Kill and start the process: the host tier is empty, the disk tier keeps its blocks."""
        self.kill()
        self.start()

    def status(self) -> dict[str, Any]:
        """Return the node's status. Raises NodeGoneError if the node does not answer."""
        return self._query(m.Status())

    def members(self) -> list[dict[str, Any]]:
        """Return the members of the node's pools, in its view; empty without a pool."""
        pools: list[dict[str, Any]] = self._query(m.Members())["shared"]
        return [member for pool in pools for member in pool["members"]]

    def plans(self) -> dict[str, Any]:
        return self._query(m.Plans())

    def last_plan(self) -> int:
        """Return the number of the node's newest plan, 0 if it has none. Numbers are random."""
        newest = self.plan_after(0)
        return int(newest["plan"]) if newest else 0

    def plan_after(self, number: int) -> dict[str, Any] | None:
        """Return the node's newest plan; None if it has none, or the newest has this number."""
        newest_first: list[dict[str, Any]] = self.plans()["plans"]
        if not newest_first or int(newest_first[0]["plan"]) == number:
            return None
        return newest_first[0]

    def drop_all(self) -> None:
        """Drop every block from the node; copies in a pool stay."""
        self._query(m.Drop("*"))

    def listing(self) -> list[dict[str, Any]]:
        """Return the stored blocks by fingerprint, domain and tier."""
        return msgspec.convert(self._query(m.List())["blocks"], list[dict[str, Any]])

    def drop(self, fingerprint: str) -> None:
        """Drop all blocks of one fingerprint."""
        self._query(m.Drop(fingerprint))

    def token_bytes(self) -> float:
        """Return the payload bytes per token in the namespace with the most blocks."""
        namespaces: list[dict[str, Any]] = self._query(m.List())["blocks"]
        if not namespaces:
            raise HoldfastError("the node holds nothing: the engine saved no block to it")
        largest = max(namespaces, key=lambda namespace: namespace["blocks"])
        return float(largest["raw_bytes"] / largest["block_tokens"])

    def wait_idle(self) -> None:
        """Return once the write-behind queue is empty."""
        wait_until(self.process, lambda: self.status()["waiting_to_write"] == 0, DURABLE_S, "idle")

    def wait_recovered(self) -> None:
        """Return once the index again holds all blocks that were on disk at the start."""
        wait_until(self.process, lambda: self.status()["recovery_s"] is not None, DURABLE_S)

    def wait_on_disk(self, blocks: int, within_s: float = DURABLE_S) -> None:
        """Return once the disk tier holds at least `blocks` blocks; a crash does not lose them."""
        state = f"holding {blocks} blocks on disk"
        wait_until(self.process, lambda: self.blocks_on_disk() >= blocks, within_s, state)

    def blocks_on_disk(self) -> int:
        tiers = self.status()["tiers"]
        return sum(int(tier["records"]) for tier in tiers if tier["tier"] == "disk")

    def _query(self, request: m.Request) -> dict[str, Any]:
        with closing(Client(self.address, m.Hello(m.PROTOCOL, "bench"), ANSWER_S)) as client:
            return call(client, request, m.ReportReply).data

    def _ready(self) -> bool:
        try:
            self.status()
        except NodeGoneError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()
