"""A pool for the chaos campaign: target processes, a proxy before each, and users that check."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from holdfast.errors import HoldfastError, Outcome, ProtocolError
from holdfast.limits import MIB, TOKEN_S_MAX
from holdfast.pause import pause, resume
from holdfast.probe import free_port
from holdfast.testing.campaign import Tally
from holdfast.testing.chained import Chained
from holdfast.testing.chaos_proxy import ANEW, ChaosProxy, Mood
from holdfast.testing.payloads import is_right
from holdfast.testing.standstill import Standstills
from holdfast.tiers.pool.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.members import Member, State
from holdfast.tiers.pool.membership import MembershipOptions
from holdfast.tiers.pool.tier import PoolOptions, PoolTier
from holdfast.wire.credentials import Credentials
from holdfast.wire.stream import Deadline
from holdfast.wire.target import Target
from holdfast.wire.target_connection import connect
from holdfast.wire.target_messages import Put
from holdfast.wire.token import VERBS, issue

PAYLOAD_BYTES = 60_000
CHAIN_BLOCKS = 6
DEADLINE_S = 0.5
ASK_S = 0.25
SLACK_S = 1.0
"""What a call may be late by on a machine that does other things too, and does not stand still."""

USERS = 3
KEPT = 60
_READY_S = 60.0
_OWNER_ONLY = 0o600
_NOISE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(64), b"\x10")
"""What strangers say, and wait; the first says nothing at all."""

_OVERSIZE_HEADERS = 9_000
_OPTIONS = PoolOptions(
    deadline_s=DEADLINE_S,
    ask_s=ASK_S,
    membership=MembershipOptions(dead_after_s=1.5, overlap_s=20.0, ramp_s=2.0, fleeting_s=0.5),
    health=HealthOptions(breaker=BreakerOptions(pause_s=0.25, pause_max_s=1.0), ejection_s=2.0),
)


class ChaosTarget:
    """`holdfast serve` with memory only, behind a proxy; it lets in who has a token."""

    def __init__(self, folder: Path, key_file: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port()  # nobody's who connects while it is dead
        self._file, self._log = folder / "target.yaml", folder / "target.log"
        tiers = [{"kind": "host", "capacity": 64 * MIB}]
        listen = f"tcp://127.0.0.1:{self._port}"
        tokens = {"key_file": str(key_file)}
        self._file.write_text(yaml.safe_dump({"listen": listen, "tiers": tiers, "tokens": tokens}))
        self.proxy = ChaosProxy(self._port)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = os.pipe()
        """It ends when the second end closes: with us, whatever becomes of us."""

    def start(self) -> None:
        """Start it; `wait` until it serves."""
        argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(self._file)]
        theirs = self._pipe[0]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*argv, "--with-parent", str(theirs)],
                pass_fds=[theirs],
                stdout=subprocess.DEVNULL,
                stderr=log,
                process_group=0,  # an interrupt at the terminal is for who counts, not for targets
            )

    def wait(self) -> None:
        """Wait until it takes connections."""
        end = time.monotonic() + _READY_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
                return
            time.sleep(0.05)
        raise HoldfastError(f"a target did not start within {_READY_S:.0f} s; see {self._log}")

    def pester(self, token: Credentials) -> list[socket.socket]:
        """Send what no peer sends, as strangers, and as a peer a batch over every limit.

        Returns the strangers' ends, most of which will never say more.
        """
        strangers = []
        for said in _NOISE:
            with contextlib.suppress(OSError):
                strangers.append(socket.create_connection(("127.0.0.1", self._port), 1.0))
                strangers[-1].sendall(said)
        address, deadline = f"tcp://127.0.0.1:{self._port}", Deadline.within(DEADLINE_S)
        with contextlib.suppress(OSError, ProtocolError):
            connection = connect(address, token, deadline)
            with contextlib.closing(connection):
                connection.ask(Put(bytes(128) * _OVERSIZE_HEADERS), [bytes(4096)], (), deadline)
        return strangers

    def pause(self) -> None:
        """Stop its process where it is."""
        if self._process is not None:
            pause(self._process.pid)

    def resume(self) -> None:
        """Let its process go on."""
        if self._process is not None:
            resume(self._process.pid)

    def kill(self) -> None:
        """End its process as a crash would, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it."""
        self.proxy.close()
        self.kill()
        for end in self._pipe:
            os.close(end)


class ChaosPool:
    """Targets by name, and the pool tier of one host in this process."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        key_file, token = folder / "token.key", folder / "token"
        self._signing = os.urandom(32)
        for file in (key_file, token):
            file.touch(_OWNER_ONLY)
        key_file.write_bytes(self._signing)
        self.credentials = Credentials(token_file=str(token))
        self.renew_token()
        self.targets = {
            f"t{number}": ChaosTarget(folder / f"t{number}", key_file) for number in range(count)
        }
        for target in self.targets.values():
            target.start()
        for target in self.targets.values():
            target.wait()
        self._tell: Callable[[Sequence[Member]], None] = lambda _: None
        self.tier = PoolTier(
            self, lambda member: Target(member.address, self.credentials), _OPTIONS
        )
        self.flapped = 0
        self.standstills = Standstills()
        self._strangers: list[socket.socket] = []
        self.list_all()

    def watch(self, told: Callable[[Sequence[Member]], None]) -> None:
        """Be the pool's membership source."""
        self._tell = told

    def trouble(self) -> str:
        """Nothing is wrong with the list."""
        return ""

    def list_all(self, draining: str = "", without: str = "") -> None:
        """Announce the members."""
        self._tell(
            [
                Member(
                    id=name,
                    address=target.proxy.address,
                    state=State.DRAINING if name == draining else State.SERVING,
                )
                for name, target in self.targets.items()
                if name != without
            ]
        )

    def mood(self, names: Sequence[str], mood: Mood) -> None:
        """Let the network before some targets be like that."""
        for name in names:
            self.targets[name].proxy.mood = mood
            if mood in ANEW:
                self.targets[name].proxy.cut()

    def renew_token(self, age_s: float = 0.0) -> None:
        """Write the token that connections made from now on show, `age_s` seconds old."""
        line = issue(self._signing, "chaos", VERBS, TOKEN_S_MAX, time.time() - age_s)
        file = Path(self.credentials.token_file)
        fresh = file.with_suffix(".new")
        fresh.touch(_OWNER_ONLY)
        fresh.write_text(f"{line}\n")
        fresh.rename(file)

    def pester(self, name: str) -> None:
        """Let strangers come to a target, past its proxy, and stay."""
        self._strangers += self.targets[name].pester(self.credentials)

    def send_strangers_away(self) -> None:
        """Let those who came by `pester` go."""
        while self._strangers:
            self._strangers.pop().close()

    def closed(self) -> set[str]:
        """Return the members that users' requests go to."""
        return {name for name in self.targets if self.tier.health.trusted(name)}

    def close(self) -> None:
        """As a source there is nothing to stop."""

    def end(self) -> None:
        """Close the tier and end the targets."""
        self.send_strangers_away()
        self.standstills.close()
        self.tier.close()
        for target in self.targets.values():
            target.close()


class Users:
    """Threads that save new chains and read old ones all the time, every byte checked."""

    def __init__(self, pool: ChaosPool, calls: Tally, blocks: Tally, seed: int) -> None:
        self._pool = pool
        self._calls = calls
        self._blocks = blocks
        self._kept: list[Chained] = []
        self._lock = threading.Lock()
        self._ending = False
        self.lied_to = False
        """Whether answers may be other than the targets': then a record may fail its check."""
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{number}"),))  # noqa: S311 - replayed
            for number in range(USERS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let each come to the end of its call."""
        self._ending = True
        for thread in self._threads:
            thread.join()

    def share(self, chains: int = 12) -> float:
        """Save so many new chains, read them; return the share of blocks that came back."""
        fresh = [Chained(PAYLOAD_BYTES) for _ in range(chains)]
        for chain in fresh:
            self._save(chain)
        return sum(map(self._load, fresh)) / (chains * CHAIN_BLOCKS)

    def _run(self, dice: random.Random) -> None:
        while not self._ending:
            if len(self._kept) < USERS or dice.random() < 0.3:  # noqa: PLR2004 - reads prevail
                chain = Chained(PAYLOAD_BYTES)
                self._save(chain)
                with self._lock:
                    self._kept = [*self._kept[-KEPT:], chain]
            else:
                self._load(dice.choice(self._kept))
            time.sleep(0.005)

    def _save(self, chain: Chained) -> None:
        puts = chain.puts(range(CHAIN_BLOCKS))
        self._timed("write", DEADLINE_S, lambda: self._pool.tier.write(puts))

    def _load(self, chain: Chained) -> int:
        """Ask, read and check as a store does; return how many blocks came and are right."""
        tier, keys, lied_to = self._pool.tier, chain.keys(CHAIN_BLOCKS), self.lied_to
        self._timed("held", ASK_S, lambda: tier.held(chain.world, keys, 0))
        gets = chain.gets(range(CHAIN_BLOCKS))
        outcomes: list[Outcome] = []
        self._timed("read", DEADLINE_S, lambda: outcomes.extend(tier.read(gets)))
        came = [get for get, told in zip(gets, outcomes, strict=True) if told is Outcome.OK]
        try:
            right = sum(is_right(get.into, chain.world, get.key) for get in came)
        except AssertionError:
            self._blocks.fail(f"a wrong byte in a block of {CHAIN_BLOCKS} that were read")
            return 0
        refused = len(came) - right
        with self._lock:
            self._blocks.tried += right
            self._blocks.counts.update(str(outcome) for outcome in outcomes)
            self._blocks.counts["refused"] += refused
            honest = not (lied_to or self.lied_to)
            if honest and refused:
                self._blocks.fail(f"{refused} damaged records that nobody damaged")
        return right

    def _timed(self, verb: str, most_s: float, call: Callable[[], object]) -> None:
        begun_s = time.monotonic()
        call()
        took_s = time.monotonic() - begun_s
        stood_s = 0.0
        if took_s > most_s + SLACK_S:
            stood_s = self._pool.standstills.within(begun_s, begun_s + took_s)
        with self._lock:
            self._calls.tried += 1
            longest = f"{verb}_longest_s"
            self._calls.figures[longest] = max(self._calls.figures.get(longest, 0.0), took_s)
            if took_s - stood_s > most_s + SLACK_S:
                self._calls.fail(f"a {verb} took {took_s:.2f} s of {most_s:g}")
            elif stood_s:
                self._calls.counts["late while a processor stood still"] += 1
