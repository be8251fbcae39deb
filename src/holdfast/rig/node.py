"""A real node on this machine: `holdfast serve`, killed and started at will."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from holdfast.errors import HoldfastError, NodeGoneError
from holdfast.limits import GIB
from holdfast.rig.process import Process, wait_until
from holdfast.wire.client import Client
from holdfast.wire.messages import PROTOCOL, Drop, Hello, List, Members, Plans, Report, Status

HOST_BYTES = 2 * GIB
DISK_BYTES = 4 * GIB
READY_S = 60.0
DURABLE_S = 60.0
ANSWER_S = 20.0


class Node:
    """A node with a host and a disk tier in a folder of its own; it serves when made.

    `settings` stand over its configuration; it also listens on `also`, an address for other nodes,
    and its command begins with `inside`: see `holdfast.rig.network.Host`.
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
        self._config = folder / "node.yaml"
        self._log = folder / "node.log"
        tiers = [
            {"kind": "host", "capacity": host_bytes},
            {"kind": "disk", "path": str(folder / "disk"), "capacity": disk_bytes},
        ]
        listen = [self.address, also] if also else self.address
        config = {"listen": listen, "tiers": tiers, **(settings or {})}
        self._config.write_text(yaml.safe_dump(config))
        self._inside = list(inside)
        self.start()

    def start(self) -> None:
        """Start the process; return when it serves."""
        argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(self._config)]
        argv = [*self._inside, *argv]
        self.process = Process("the node", argv, self._log, {})
        try:
            wait_until(self.process, self._ready, READY_S)
        except BaseException:
            self.process.kill()
            raise

    def kill(self) -> None:
        """End the process as a crash would: kill -9."""
        self.process.kill()

    def restart(self) -> None:
        """Kill and start: the host tier is empty, the disk tier is as it was."""
        self.kill()
        self.start()

    def status(self) -> dict[str, Any]:
        """Return what the node says of itself. Raises NodeGoneError where it does not answer."""
        return self._look(Status())

    def members(self) -> list[dict[str, Any]]:
        """Return what the node knows of the members of its pool; empty without one."""
        pools: list[dict[str, Any]] = self._look(Members())["shared"]
        return [member for pool in pools for member in pool["members"]]

    def plans(self) -> dict[str, Any]:
        """Return the node's last plans, and what it made them from."""
        return self._look(Plans())

    def last_plan(self) -> int:
        """Return the number of the node's last plan; 0 before the first."""
        return max((int(plan["plan"]) for plan in self.plans()["plans"]), default=0)

    def last_reason(self) -> str:
        """Return why the node's last plan cut where it did, in its words; "" if it made none."""
        newest_first: list[dict[str, Any]] = self.plans()["plans"]
        return str(newest_first[0]["reason"]) if newest_first else ""

    def records(self) -> int:
        """Return how many records its tiers hold; a block in two tiers counts twice."""
        return sum(int(tier["records"]) for tier in self.status()["tiers"])

    def drop_all(self) -> None:
        """Let the node forget every block; what it gave to a pool stays there."""
        self._look(Drop("*"))

    def token_bytes(self) -> float:
        """Return the bytes that the node keeps per token, of what it holds most of."""
        worlds: list[dict[str, Any]] = self._look(List())["blocks"]
        if not worlds:
            raise HoldfastError("the node holds nothing: the engine saved no block to it")
        largest = max(worlds, key=lambda world: world["blocks"])
        return float(largest["payload_bytes"] / largest["block_tokens"])

    def wait_idle(self) -> None:
        """Return once nothing waits to be written to disk."""
        wait_until(self.process, lambda: self.status()["waiting_to_write"] == 0, DURABLE_S, "idle")

    def wait_recovered(self) -> None:
        """Return once everything found on disk at the start is in the index again."""
        wait_until(self.process, lambda: self.status()["recovery_s"] is not None, DURABLE_S)

    def wait_on_disk(self, blocks: int, within_s: float = DURABLE_S) -> None:
        """Return once the disk tier holds so many blocks, so that a crash loses none of them."""
        state = f"holding {blocks} blocks on disk"
        wait_until(self.process, lambda: self.blocks_on_disk() >= blocks, within_s, state)

    def blocks_on_disk(self) -> int:
        """Return how many blocks the disk tier holds."""
        tiers = self.status()["tiers"]
        return sum(int(tier["records"]) for tier in tiers if tier["tier"] == "disk")

    def _look(self, question: Status | List | Members | Plans | Drop) -> dict[str, Any]:
        client = Client(self.address, Hello(PROTOCOL, "rig"), ANSWER_S)
        try:
            reply = client.call(question, ANSWER_S)
        finally:
            client.close()
        if not isinstance(reply, Report):
            raise HoldfastError(f"the node answered {reply!r} to {question!r}")
        return reply.data

    def _ready(self) -> bool:
        try:
            self.status()
        except NodeGoneError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.stop()
