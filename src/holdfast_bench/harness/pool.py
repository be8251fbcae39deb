"""A real pool on this machine: targets, engine hosts, and the tokens that admit the hosts."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import yaml

from holdfast.errors import HoldfastError
from holdfast.limits import MIB, TOKEN_S_MAX
from holdfast.membership.members import Member
from holdfast.regular_file import replace_file
from holdfast.tiers.breaker import BreakerPhase
from holdfast.wire.remote.token import VERBS, issue
from holdfast_bench.harness.network import Network
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.pause import pause, resume
from holdfast_bench.harness.process import POLL_S, wait_until

TARGET_HOST_BYTES = 512 * MIB
TARGET_DISK_BYTES = 1024 * MIB
HOST_BYTES = 1024 * MIB

RAMP_S = 1.0
"""How soon a target that joins gets its full share; the default is five minutes."""

DEADLINE_S = 4.0
"""Deadline of pool calls; engines and nodes share a few cores here, so answers may be late."""

ASK_S = 0.25
"""Deadline of lookups in the pool."""

FULL_SHARE_MIN = 0.99
"""Part of an equal share that counts as the full share of a member."""

WAIT_TIMEOUT_S = 60.0
_MEMBERS = "members.yaml"
_KEY_BYTES = 32


class ManualMembers:
    """A membership source whose members the caller sets, at the start or with `publish`."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self._members = members
        self.publish: Callable[[Sequence[Member]], None] = lambda _: None

    def watch(self, on_members: Callable[[Sequence[Member]], None]) -> None:
        """Set the receiver of `publish`, and give it the members of the start."""
        self.publish = on_members
        if self._members:
            on_members(self._members)

    def trouble(self) -> str:
        """Return the current fault: always none."""
        return ""

    def close(self) -> None:
        """Do nothing: no thread runs."""


class SilentTargets(enum.StrEnum):
    """How targets become silent: their processes are stopped, or their packets are dropped."""

    STOPPED = "stopped"
    CUT = "cut"


class PoolUnderTest:
    """Targets and engine hosts on a network, with their keys and members file in a folder."""

    def __init__(self, stack: ExitStack, folder: Path, network: Network) -> None:
        """Create keys and tokens; `stack` stops all processes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.targets: dict[str, NodeUnderTest] = {}
        self.hosts: dict[str, NodeUnderTest] = {}
        self._stack, self._folder, self._network = stack, folder, network
        self._addresses: dict[str, str] = {}
        self._started = 0
        self._domain_key = self._replace("domain.key", secrets.token_bytes(_KEY_BYTES))
        self._signing = secrets.token_bytes(_KEY_BYTES)
        self._token_key = self._replace("token.key", self._signing)
        self._token = self.renew_token()

    def start_targets(
        self, count: int, disk_bytes: int = TARGET_DISK_BYTES, bits_per_s: int = 0
    ) -> list[str]:
        """Start targets, write the members file, and return the new targets' names.

        `bits_per_s`: rate of each target's link; 0: no limit.
        """
        self.renew_token()
        names = [f"target-{self._started + number}" for number in range(1, count + 1)]
        self._started += count
        for name in names:
            place = self._network.host(bits_per_s)
            node = NodeUnderTest(
                self._folder / name,
                TARGET_HOST_BYTES,
                disk_bytes,
                settings={"tokens": {"key_file": self._token_key}},
                also=place.address,
                inside=place.inside,
            )
            self.targets[name] = self._stack.enter_context(node)
            self._addresses[name] = place.address
        members = [{"id": name, "address": at} for name, at in self._addresses.items()]
        self._replace(_MEMBERS, yaml.safe_dump({"members": members}).encode())
        return names

    def start_host(self, name: str, plan: str = "best") -> NodeUnderTest:
        """Start an engine host's node with this planner; return when it knows every member."""
        pool = {"kind": "pool", "members": str(self._folder / _MEMBERS)}
        settings = {
            "tiers": [
                {"kind": "host", "capacity": HOST_BYTES},
                {**pool, "deadline_s": DEADLINE_S, "ask_s": ASK_S, "ramp_s": RAMP_S},
            ],
            "domains": {"default": {"key_file": self._domain_key}},
            "tokens": {"file": self._token},
            "plan": plan,
        }
        place = self._network.host()
        node = NodeUnderTest(self._folder / name, settings=settings, inside=place.inside)
        self.hosts[name] = self._stack.enter_context(node)
        self.wait_agreed()
        return node

    def silences(self) -> list[SilentTargets]:
        """Return the ways in which targets can become silent on this network."""
        return [SilentTargets.STOPPED, *([SilentTargets.CUT] if self._network.cuts else [])]

    @contextmanager
    def silent(self, silence: SilentTargets) -> Iterator[None]:
        """Keep all targets silent: no request is answered or refused."""
        addresses = [self._addresses[name] for name in self.targets]
        try:
            if silence is SilentTargets.CUT:
                for address in addresses:
                    self._network.cut(address)
            else:
                for target in self.targets.values():
                    pause(target.process.pid)
            yield
        finally:
            for target in self.targets.values():
                with suppress(ProcessLookupError):  # it has ended
                    resume(target.process.pid)
            for address in addresses:
                self._network.mend(address)

    def replace_target(self, dead: str) -> str:
        """Start a target in place of a dead one; return its name once it has its full share."""
        del self._addresses[dead]
        [name] = self.start_targets(1)
        self.wait_agreed()
        return name

    @property
    def is_whole(self) -> bool:
        """Whether every listed target runs."""
        return self.targets.keys() == self._addresses.keys()

    def wait_agreed(self) -> None:
        """Return once every host's members are the listed targets, each in use with its full share.

        A host removes a member 15 s after it is no longer listed, and does without a member for
        30 s if that is much slower than the others, which happens on a busy machine.
        """
        for name, host in self.hosts.items():
            agreed = partial(self._agrees, host)
            wait_until(host.process, agreed, WAIT_TIMEOUT_S, f"sure of {name}'s members")

    def _agrees(self, host: NodeUnderTest) -> bool:
        members = {member["id"]: member for member in host.members()}
        share_min = FULL_SHARE_MIN / len(self._addresses)
        return members.keys() == self._addresses.keys() and all(
            member["share"] > share_min
            and not member.get("ejected", False)  # absent for a moment after the member is listed
            and member.get("phase", BreakerPhase.CLOSED) == BreakerPhase.CLOSED
            for member in members.values()
        )

    def wait_holding(self, blocks: int) -> None:
        """Return once the running targets hold at least `blocks` blocks together."""
        end_s = time.monotonic() + WAIT_TIMEOUT_S
        while (held := sum(self.blocks().values())) < blocks:
            if time.monotonic() > end_s:
                raise HoldfastError(
                    f"the targets hold {held} blocks of {blocks} after {WAIT_TIMEOUT_S:.0f} s; "
                    f"their logs are below {self._folder}"
                )
            time.sleep(POLL_S)

    def blocks(self) -> dict[str, int]:
        return {name: int(node.status()["blocks"]) for name, node in self.targets.items()}

    def renew_token(self) -> str:
        """Write a new access token, valid for ten minutes, and return its path."""
        line = issue(self._signing, "the hosts", VERBS, TOKEN_S_MAX, time.time())
        return self._replace("token", f"{line}\n".encode())

    def _replace(self, name: str, content: bytes) -> str:
        replace_file(self._folder / name, content)
        return str(self._folder / name)
