"""A real pool on this machine: targets and engine hosts, let in by token, started and killed."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import yaml

from holdfast.errors import HoldfastError
from holdfast.limits import MIB, TOKEN_S_MAX
from holdfast.pause import pause, resume
from holdfast.rig.network import Network
from holdfast.rig.node import Node
from holdfast.rig.process import POLL_S, wait_until
from holdfast.wire.token import VERBS, issue

TARGET_HOST_BYTES = 512 * MIB
TARGET_DISK_BYTES = 1024 * MIB
HOST_BYTES = 1024 * MIB

RAMP_S = 1.0
"""A target that joins gets its whole share so soon here; five minutes would be long to watch."""

DEADLINE_S = 4.0
"""Engines and nodes share a few cores here: an answer may have to queue."""

EVEN = 0.99
SETTLED_S = 60.0
_OWNER_ONLY = 0o600
_KEY_BYTES = 32


class Silence(enum.StrEnum):
    """How targets fall silent: connections are accepted and nothing answered, or packets lost."""

    STOPPED = "stopped"
    CUT = "cut"


class Pool:
    """Targets and engine hosts on a network, with their keys and members file in a folder."""

    def __init__(self, stack: ExitStack, folder: Path, network: Network) -> None:
        """Make keys and tokens; whatever is started ends with `stack`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.targets: dict[str, Node] = {}
        self.hosts: dict[str, Node] = {}
        self._stack, self._folder, self._network = stack, folder, network
        self._addresses: dict[str, str] = {}
        self._started = 0
        self._members = folder / "members.yaml"
        self._domain_key = self._secret("domain.key", secrets.token_bytes(_KEY_BYTES))
        self._signing = secrets.token_bytes(_KEY_BYTES)
        self._token_key = self._secret("token.key", self._signing)
        self._token = self.renew_token()

    def start_targets(self, count: int, disk_bytes: int = TARGET_DISK_BYTES) -> list[str]:
        """Start targets, list them as members, and return their names."""
        self.renew_token()
        names = [f"target-{self._started + number}" for number in range(1, count + 1)]
        self._started += count
        for name in names:
            place = self._network.host()
            node = Node(
                self._folder / name,
                TARGET_HOST_BYTES,
                disk_bytes,
                settings={"tokens": {"key_file": self._token_key}},
                also=place.address,
                inside=place.inside,
            )
            self.targets[name] = self._stack.enter_context(node)
            self._addresses[name] = place.address
        self._list()
        return names

    def start_host(self, name: str, plan: str = "best") -> Node:
        """Start the node of an engine host, which plans so; return when it knows every member."""
        pool = {"kind": "pool", "members": str(self._members)}
        settings = {
            "tiers": [
                {"kind": "host", "capacity": HOST_BYTES},
                {**pool, "deadline_s": DEADLINE_S, "ramp_s": RAMP_S},
            ],
            "domains": {"default": {"key_file": self._domain_key}},
            "tokens": {"file": self._token},
            "plan": plan,
        }
        place = self._network.host()
        node = Node(self._folder / name, settings=settings, inside=place.inside)
        self.hosts[name] = self._stack.enter_context(node)
        self.wait_agreed()
        return node

    def kill_target(self, name: str) -> None:
        """End a target as a crash would; it stays among the members."""
        self.targets.pop(name).kill()

    def silences(self) -> list[Silence]:
        """Return the ways in which targets can fall silent on this network."""
        return [Silence.STOPPED, *([Silence.CUT] if self._network.cuts else [])]

    @contextmanager
    def silent(self, silence: Silence) -> Iterator[None]:
        """Let no target answer meanwhile, and none refuse."""
        addresses = [self._addresses[name] for name in self.targets]
        try:
            if silence is Silence.CUT:
                for address in addresses:
                    self._network.cut(address)
            else:
                for target in self.targets.values():
                    pause(target.process.pid)
            yield
        finally:
            for target in self.targets.values():
                resume(target.process.pid)
            for address in addresses:
                self._network.mend(address)

    def replace_target(self, dead: str) -> str:
        """Start another target instead of a dead one; return its name once it has its share."""
        del self._addresses[dead]
        [name] = self.start_targets(1)
        self.wait_agreed()
        return name

    def wait_agreed(self) -> None:
        """Return once every host has the living targets for members, with their whole shares.

        It takes 15 s until a host believes that one is gone.
        """
        for name, host in self.hosts.items():
            agreed = partial(self._agrees, host)
            wait_until(host.process, agreed, SETTLED_S, f"sure of {name}'s members")

    def _agrees(self, host: Node) -> bool:
        shares = {member["id"]: member["share"] for member in host.members()}
        even = 1 / len(self._addresses)
        return shares.keys() == self._addresses.keys() and min(shares.values()) > EVEN * even

    def wait_holding(self, blocks: int) -> None:
        """Return once the living targets hold so many blocks in all."""
        end_s = time.monotonic() + SETTLED_S
        while (held := sum(self.blocks().values())) < blocks:
            if time.monotonic() > end_s:
                raise HoldfastError(
                    f"the targets hold {held} blocks of {blocks} after {SETTLED_S:.0f} s; "
                    f"their logs are below {self._folder}"
                )
            time.sleep(POLL_S)

    def blocks(self) -> dict[str, int]:
        """Return how many blocks each living target holds."""
        return {name: int(node.status()["blocks"]) for name, node in self.targets.items()}

    def renew_token(self) -> str:
        """Write a fresh token, as a timer would: one lasts ten minutes. Return its file."""
        line = issue(self._signing, "the hosts", VERBS, TOKEN_S_MAX, time.time())
        return self._secret("token", f"{line}\n".encode())

    def _list(self) -> None:
        members = [{"id": name, "address": at} for name, at in self._addresses.items()]
        fresh = self._members.with_suffix(".new")
        fresh.write_text(yaml.safe_dump({"members": members}))
        fresh.rename(self._members)

    def _secret(self, name: str, content: bytes) -> str:
        file = self._folder / name
        fresh = file.with_suffix(".new")
        fresh.touch(_OWNER_ONLY)
        fresh.write_bytes(content)
        fresh.rename(file)  # a node may be reading the one before
        return str(file)
