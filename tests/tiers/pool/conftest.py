"""Pools over targets in memory, and servers that members register with, run by the tests."""

import random
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from holdfast.blocks.envelope import read_header
from holdfast.blocks.key import Chain
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack, payload, verify
from holdfast.errors import Outcome, RefusedError
from holdfast.probe import free_port
from holdfast.rig.certificates import Authority
from holdfast.rig.process import Process, wait_until
from holdfast.testing.payloads import header_of, payload_of, world_of
from holdfast.tiers.base import Get, Put, segment_place
from holdfast.tiers.pool.breaker import BreakerOptions
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.membership import MembershipOptions
from holdfast.tiers.pool.tier import PoolOptions, PoolTier
from holdfast.wire.credentials import client_context
from holdfast.wire.target import Found, Got, Held

WORLD = world_of(8_000)
QUICK = PoolOptions(
    deadline_s=20.0,  # a busy machine is not what these targets are judged by
    ask_s=20.0,
    membership=MembershipOptions(dead_after_s=0.0, ramp_s=0.0, fleeting_s=0.0),
    health=HealthOptions(breaker=BreakerOptions(failures=2, pause_s=30.0)),
)


class FakeTarget:
    """A target in memory that can be dead, slow or rude."""

    def __init__(self) -> None:
        self.epoch = 0
        self.records = {}
        self.mood = "well"
        self.slow_s = 0.2
        self.calls = 0
        self.callers = []

    def put(self, records, deadline_s, heard=None):
        if not self._answers():
            return [Outcome.GONE] * len(records)
        for record in records:
            self.records[read_header(record)[0].key] = bytes(record)
        return [Outcome.OK] * len(records)

    def get(self, world, keys, into, deadline_s, heard=None):
        if not self._answers():
            return Got(0, Outcome.GONE)
        for number, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if key not in self.records:
                return Got(number, Outcome.MISS)
            buffer[:] = self.records[key]
        return Got(len(keys), Outcome.OK)

    def exist(self, world, keys, deadline_s):
        if not self._answers():
            return Held(bytes(len(keys)), Outcome.GONE)
        return Held(bytes(key in self.records for key in keys), Outcome.OK)

    def delete(self, world, keys, deadline_s):
        return Found(sum(self.records.pop(key, None) is not None for key in keys), Outcome.OK)

    def stats(self, deadline_s):
        return {}, Outcome.OK if self._answers() else Outcome.GONE

    def stage(self, world, keys, deadline_s):
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _answers(self) -> bool:
        self.calls += 1
        self.callers.append(threading.current_thread())
        if "slow" in self.mood:
            time.sleep(self.slow_s)
        if self.mood == "rude":
            raise RefusedError("go away")
        return "dead" not in self.mood


class Source:
    """Members as the test says."""

    def watch(self, told) -> None:
        self.told = told

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        pass


class Fleet:
    """A pool over fake targets."""

    def __init__(self, count: int, options: PoolOptions) -> None:
        self.targets = {f"t{i}": FakeTarget() for i in range(count)}
        self.source = Source()
        self.pool = PoolTier(self.source, lambda member: self.targets[member.id], options)
        self.announce(self.targets)

    def announce(self, names) -> None:
        self.source.told(
            [Member(id=name, address=f"tcp://10.0.0.{int(name[1:]) + 1}:7000") for name in names]
        )

    def chain(self, seed: int, blocks: int) -> Chain:
        chain = Chain(b"k" * 32, WORLD.fingerprint, 1)
        dice = random.Random(seed)
        chain.extend([dice.randrange(1000) for _ in range(blocks)])
        return chain

    def write(self, chain: Chain) -> list[Outcome]:
        return self.pool.write(self.puts(chain))

    def puts(self, chain: Chain) -> list[Put]:
        return [Put(place, record) for place, record in self.records(chain)]

    def records(self, chain: Chain):
        for depth, key in enumerate(chain.keys):
            record = aligned_buffer(WORLD.record_bytes)
            payload(record, WORLD.payload_bytes)[:] = payload_of(key, WORLD.payload_bytes)
            header = header_of(WORLD, key)._replace(depth=depth, segment=chain.segment(depth))
            pack(record, header)
            yield segment_place(chain.segment(depth)), record

    def read(self, chain: Chain) -> list[Outcome]:
        gets = [
            Get(
                segment_place(chain.segment(depth)),
                key,
                aligned_buffer(WORLD.record_bytes),
                WORLD,
            )
            for depth, key in enumerate(chain.keys)
        ]
        outcomes = self.pool.read(gets)
        for get, outcome in zip(gets, outcomes, strict=True):
            if outcome is Outcome.OK:
                sizes = (WORLD.fingerprint, WORLD.payload_bytes)
                assert verify(get.into, get.key, *sizes) is Outcome.OK
        return outcomes


@pytest.fixture
def fleet():
    """Call to get a pool of so many targets; changes are to its options."""
    made = []

    def make(count: int = 4, **changes) -> Fleet:
        made.append(Fleet(count, msgspec.structs.replace(QUICK, **changes)))
        return made[-1]

    yield make
    for one in made:
        one.pool.close()


def find_etcd():
    """Return etcd's program; skip, saying why, where there is none and none can be installed."""
    if found := shutil.which("etcd"):
        return found
    install = ["apt-get", "install", "-y", "--no-install-recommends", "etcd-server"]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=240, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no etcd here, and it can not be installed: {error}")
    if not (found := shutil.which("etcd")):
        why = (done.stderr.strip() or "apt-get says nothing").splitlines()[-1]
        pytest.skip(f"no etcd here, and `{' '.join(install)}` fails: {why}")
    return found


class EtcdServer:
    """One real etcd on the loopback interface, that can be stopped and started again."""

    def __init__(self, program, folder, tls=None):
        self._tls = tls
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{free_port()}"
        peer = f"http://127.0.0.1:{free_port()}"
        self._argv = [program, "--data-dir", str(folder / "data"), "--logger", "zap"]
        self._argv += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        self._argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._argv += ["--initial-cluster", f"default={peer}"]
        if tls:
            self._argv += ["--cert-file", tls.cert, "--key-file", tls.key]
            self._argv += ["--trusted-ca-file", tls.ca, "--client-cert-auth"]
        self._log = folder / "etcd.log"
        self.process = None
        self.start()

    def start(self):
        """Start it, if it does not run, and wait until it serves."""
        if self.process is None:
            self.process = Process("etcd", self._argv, self._log, {})
            wait_until(self.process, self._healthy, 60)

    def stop(self):
        """Stop it; what it knows is kept for the next start."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _healthy(self):
        context = client_context(self._tls) if self._tls else None
        try:
            health = f"{self.url}/health"
            with urllib.request.urlopen(health, timeout=2, context=context) as answer:
                return b"true" in answer.read()
        except (OSError, urllib.error.URLError):
            return False


@pytest.fixture(scope="session")
def etcd_server():
    """The session's etcd; a test that stops it starts it again."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-etcd-"))
    server = EtcdServer(find_etcd(), folder)
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
def sealed_etcd(tmp_path):
    """An etcd that lets in only whom its authority vouches for, and what `members` says of it."""
    authority = Authority(tmp_path)
    server = EtcdServer(find_etcd(), tmp_path, authority.issue("etcd"))
    ours = authority.issue("us")
    place = server.url.removeprefix("https://")
    yield server, f"etcd://{place}/pool", f"?ca={ours.ca}&cert={ours.cert}&key={ours.key}"
    server.stop()


@pytest.fixture
def etcd_url(etcd_server):
    """Where a running etcd is."""
    etcd_server.start()
    return etcd_server.url
