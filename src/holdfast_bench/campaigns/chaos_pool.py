"""The pool of the chaos campaign: target processes, a proxy before each, and users."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.errors import Outcome, ProtocolError
from holdfast.limits import MIB, TOKEN_S_MAX
from holdfast.membership.members import Member, MemberState
from holdfast.membership.membership import MembershipOptions
from holdfast.probe import free_port
from holdfast.regular_file import replace_file
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.payloads import is_right
from holdfast.testing.stalls import StallWatch
from holdfast.tiers.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.connection import connect
from holdfast.wire.remote.credentials import Credentials
from holdfast.wire.remote.messages import PutRecords
from holdfast.wire.remote.stream import Deadline
from holdfast.wire.remote.token import VERBS, issue
from holdfast_bench.campaigns.campaign import CampaignResult
from holdfast_bench.campaigns.chaos_proxy import ANEW, ChaosProxy, Mood
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.pool import ManualMembers

PAYLOAD_BYTES = 60_000
CHAIN_BLOCKS = 6
DEADLINE_S = 0.5
ASK_S = 0.25
SLACK_S = 1.0
"""How late a call may be on a machine that runs other work but does not stall."""

USERS = 3
KEPT = 60
_INVALID_GREETINGS = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(64), b"\x10")
"""First bytes of connections that are no peer's; the first sends nothing."""

_OVERSIZE_HEADERS = 9_000
_OPTIONS = PoolTierOptions(
    deadline_s=DEADLINE_S,
    ask_s=ASK_S,
    membership=MembershipOptions(dead_after_s=1.5, overlap_s=20.0, ramp_s=2.0, transient_s=0.5),
    health=HealthOptions(breaker=BreakerOptions(pause_s=0.25, pause_max_s=1.0), ejection_s=2.0),
)


class ChaosTarget(NodeUnderTest):
    """A node with a host tier only, behind a proxy; peers need a token."""

    def __init__(self, folder: Path, key_file: Path) -> None:
        # Not an ephemeral port: no client gets it while the target is dead.
        self._port = free_port()
        tiers = [{"kind": "host", "capacity": 64 * MIB}]
        settings = {"tiers": tiers, "tokens": {"key_file": str(key_file)}}
        super().__init__(folder, settings=settings, also=f"tcp://127.0.0.1:{self._port}")
        self.proxy = ChaosProxy(self._port)

    def send_invalid(self, credentials: Credentials) -> list[socket.socket]:
        """Open connections with invalid greetings, and send one batch over the limits as a peer.

        Returns the sockets with the invalid greetings, for the caller to close.
        """
        unauthenticated = []
        for greeting in _INVALID_GREETINGS:
            with contextlib.suppress(OSError):
                unauthenticated.append(socket.create_connection(("127.0.0.1", self._port), 1.0))
                unauthenticated[-1].sendall(greeting)
        address, deadline = f"tcp://127.0.0.1:{self._port}", Deadline.within(DEADLINE_S)
        with contextlib.suppress(OSError, ProtocolError):
            connection = connect(address, credentials, deadline)
            with contextlib.closing(connection):
                connection.ask(
                    PutRecords(bytes(128) * _OVERSIZE_HEADERS), [bytes(4096)], (), deadline
                )
        return unauthenticated

    def close(self) -> None:
        self.proxy.close()
        self.kill()


class ChaosPool:
    """Targets by name, and the pool tier of one host in this process."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        key_file, token = folder / "token.key", folder / "token"
        self._signing = os.urandom(32)
        replace_file(key_file, self._signing)
        self.credentials = Credentials(token_file=str(token))
        self.renew_token()
        self.targets = {
            f"t{number}": ChaosTarget(folder / f"t{number}", key_file) for number in range(count)
        }
        self._members = ManualMembers()
        self.tier = PoolTier(
            self._members, lambda member: TargetClient(member.address, self.credentials), _OPTIONS
        )
        self.flapped = 0
        self.stalls = StallWatch()
        self._unauthenticated: list[socket.socket] = []
        self.list_all()

    def list_all(self, draining: str = "", without: str = "") -> None:
        """Announce the members, except `without`; `draining` is announced in that state."""
        self._members.publish(
            [
                Member(
                    id=name,
                    address=target.proxy.address,
                    state=MemberState.DRAINING if name == draining else MemberState.SERVING,
                )
                for name, target in self.targets.items()
                if name != without
            ]
        )

    def mood(self, names: Sequence[str], mood: Mood) -> None:
        for name in names:
            self.targets[name].proxy.mood = mood
            if mood in ANEW:
                self.targets[name].proxy.cut()

    def renew_token(self, age_s: float = 0.0) -> None:
        """Write a token issued `age_s` seconds ago; new connections use it."""
        line = issue(self._signing, "chaos", VERBS, TOKEN_S_MAX, time.time() - age_s)
        replace_file(Path(self.credentials.token_file), f"{line}\n".encode())

    def send_invalid(self, name: str) -> None:
        """Send invalid data to a target, past its proxy, and keep the connections open."""
        self._unauthenticated += self.targets[name].send_invalid(self.credentials)

    def close_unauthenticated(self) -> None:
        """Close the connections that `send_invalid` opened."""
        while self._unauthenticated:
            self._unauthenticated.pop().close()

    def trusted(self) -> set[str]:
        """Return the members that receive users' requests."""
        return {name for name in self.targets if self.tier.health.trusted(name)}

    def close(self) -> None:
        self.close_unauthenticated()
        self.stalls.close()
        self.tier.close()
        for target in self.targets.values():
            target.close()


class ChaosUsers:
    """Threads that save new chains and read old ones in a loop, and check every byte."""

    def __init__(
        self, pool: ChaosPool, calls: CampaignResult, blocks: CampaignResult, seed: int
    ) -> None:
        self._pool = pool
        self._calls = calls
        self._blocks = blocks
        self._kept: list[ChainedBlocks] = []
        self._lock = threading.Lock()
        self._ending = False
        self.answers_altered = False
        """Whether the proxies alter answers; if so, records may fail their check."""
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{number}"),))  # noqa: S311 - replayed
            for number in range(USERS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads after their current calls."""
        self._ending = True
        for thread in self._threads:
            thread.join()

    def share(self, chains: int = 12) -> float:
        """Save new chains, read them, and return the share of their blocks that came back."""
        fresh = [ChainedBlocks(PAYLOAD_BYTES) for _ in range(chains)]
        for chain in fresh:
            self._save(chain)
        return sum(map(self._load, fresh)) / (chains * CHAIN_BLOCKS)

    def _run(self, rng: random.Random) -> None:
        try:
            self._use(rng)
        except Exception as error:  # noqa: BLE001  # a user that ends is a failure of the pool
            with self._lock:
                self._calls.fail(f"a user ended: {error!r:.200}")

    def _use(self, rng: random.Random) -> None:
        while not self._ending:
            if len(self._kept) < USERS or rng.random() < 0.3:  # noqa: PLR2004 - reads prevail
                chain = ChainedBlocks(PAYLOAD_BYTES)
                self._save(chain)
                with self._lock:
                    self._kept = [*self._kept[-KEPT:], chain]
            else:
                self._load(rng.choice(self._kept))
            time.sleep(0.005)

    def _save(self, chain: ChainedBlocks) -> None:
        puts = chain.puts(range(CHAIN_BLOCKS))
        self._timed("write", DEADLINE_S, lambda: self._pool.tier.write(puts))

    def _load(self, chain: ChainedBlocks) -> int:
        """Query, read and check a chain as a store does; return the number of right blocks."""
        tier, keys = self._pool.tier, chain.keys(CHAIN_BLOCKS)
        altered_before = self.answers_altered
        self._timed("held", ASK_S, lambda: tier.held(chain.namespace, keys, 0))
        gets = chain.gets(range(CHAIN_BLOCKS))
        outcomes: list[Outcome] = []
        self._timed("read", DEADLINE_S, lambda: outcomes.extend(tier.read(gets)))
        read = [get for get, out in zip(gets, outcomes, strict=True) if out is Outcome.OK]
        try:
            right = sum(is_right(get.into, chain.namespace, get.key) for get in read)
        except AssertionError:
            self._blocks.fail(f"a wrong byte in one of {CHAIN_BLOCKS} blocks that were read")
            return 0
        refused = len(read) - right
        with self._lock:
            self._blocks.tried += right
            self._blocks.counts.update(str(outcome) for outcome in outcomes)
            self._blocks.counts["refused"] += refused
            if refused and not (altered_before or self.answers_altered):
                self._blocks.fail(f"{refused} damaged records although no answer was altered")
        return right

    def _timed(self, verb: str, most_s: float, call: Callable[[], object]) -> None:
        begun_s = time.monotonic()
        call()
        took_s = time.monotonic() - begun_s
        stalled_s = 0.0
        if took_s > most_s + SLACK_S:
            stalled_s = self._pool.stalls.within(begun_s, begun_s + took_s)
        with self._lock:
            self._calls.tried += 1
            self._calls.longest(verb, took_s)
            if took_s - stalled_s > most_s + SLACK_S:
                self._calls.fail(f"a {verb} took {took_s:.2f} s; its deadline is {most_s:g} s")
            elif stalled_s:
                self._calls.counts["late because of a stall"] += 1
