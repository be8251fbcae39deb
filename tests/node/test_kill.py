"""kill -9 at any moment, again and again: what is read afterwards is right in every byte.

HOLDFAST_KILL_CYCLES sets how often (500). Two fifths kill a whole node with an engine writing to
it through its socket; the others kill a forked process with a store in it, which is cheaper, so
that more moments are hit. Payloads follow from keys, so nothing has to be remembered to check.
"""

import itertools
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from holdfast.assemble import open_store
from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.world import World
from holdfast.config import parse
from holdfast.errors import NodeGoneError, RefusedError

CYCLES = int(os.environ.get("HOLDFAST_KILL_CYCLES", "500"))
NODE_CYCLES = CYCLES * 2 // 5
STORE_CYCLES = CYCLES - NODE_CYCLES
CHAIN_BLOCKS = 8
CHAINS_KEPT = 120
MIB = 1 << 20
FINGERPRINT = b"fingerprint-16-b"


def tiers(folder):
    """A disk that is full after some cycles, so that regions are reclaimed too."""
    return [
        {"kind": "host", "capacity": 32 * MIB},
        {"kind": "disk", "path": str(folder / "disk"), "capacity": 16 * MIB, "region": MIB},
    ]


class Campaign:
    """Names of chains, new ones to write and old ones to read, and when to kill."""

    def __init__(self, names, seed):
        self._names = names
        self.random = random.Random(seed)
        self.chains = []
        self.read = 0

    def fresh(self, cycle):
        """Yield chains to save, each noted before the first byte of it is written."""
        for number in range(10_000):
            chain = self._names(f"{cycle}/{number}", CHAIN_BLOCKS)
            self.chains = [*self.chains[1 - CHAINS_KEPT :], chain]
            yield chain


@pytest.mark.timeout(0)
def test_a_killed_node_never_serves_a_wrong_byte(start_node, engine, names, tmp_path):
    campaign = Campaign(names, seed=1)
    node = start_node(tiers=tiers(tmp_path))
    for cycle in range(NODE_CYCLES):
        kill_while_writing(campaign, node, engine(node.address), cycle)
        if campaign.random.random() < 0.2:
            kill_while_starting(campaign, node)
        node.start()
        one = engine(node.address)
        one.until_recovered()
        campaign.read += sum(one.read(chain)[0] for chain in campaign.chains)
        one.close()
    assert campaign.read > NODE_CYCLES * CHAIN_BLOCKS


def kill_while_writing(campaign, node, one, cycle):
    def write():
        try:
            for chain in campaign.fresh(cycle):
                one.save(chain)
        except (NodeGoneError, RefusedError):
            return

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(campaign.random.uniform(0, 0.12))
    node.kill()
    writer.join(30)
    assert not writer.is_alive()
    one.close()


def kill_while_starting(campaign, node):
    argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(node.folder / "node.yaml")]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as starting:
        time.sleep(campaign.random.uniform(0, 0.5))
        starting.kill()


@pytest.mark.timeout(0)
def test_a_killed_store_never_serves_a_wrong_byte(names, payload, tmp_path):
    campaign = Campaign(names, seed=2)
    config = parse({"listen": f"{tmp_path}/unused.sock", "tiers": tiers(tmp_path)})
    for cycle in range(STORE_CYCLES):
        listens, says = os.pipe()
        process = os.fork()
        if not process:
            live(config, campaign, cycle, payload, says)
        os.close(says)
        with os.fdopen(listens, "rb") as heard:
            saved = kill_while_living(campaign, process, heard)
        for _ in itertools.islice(campaign.fresh(cycle), saved):
            pass
    assert campaign.read > STORE_CYCLES * CHAIN_BLOCKS


def live(config, campaign, cycle, payload, says):
    """A forked process's whole life: open, read everything, save until killed."""
    sys.setswitchinterval(0.0005)  # as a node does, or saving would hold up writing behind
    try:
        street = Street(open_store(config), payload)
        read = sum(street.read(chain) for chain in campaign.chains)
        os.write(says, b"read %d\n" % read)
        for chain in campaign.fresh(cycle):
            os.write(says, b"save\n")
            street.save(chain)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent must hear it
        os.write(says, f"wrong {error!r}\n".encode())
    finally:
        os._exit(0)


class Street:
    """Saves and reads chains of a store in this process."""

    def __init__(self, store, payload):
        store.recovery.wait()
        assert store.recovery.seconds is not None
        self.store = store
        self.payload = payload
        domain = store.domain("default")[1]
        self.arena = store.arena(domain).view
        self.nbytes = len(payload(b""))
        self.world = World(FINGERPRINT, domain, self.nbytes, 128)

    def slot(self, place):
        return self.arena[place + HEADER_BYTES : place + HEADER_BYTES + self.nbytes]

    def save(self, chain):
        reserved = self.store.reserve(self.world, chain, FINGERPRINT, 0)
        for key, place in zip(chain, reserved.places, strict=True):
            if place >= 0:
                self.slot(place)[:] = self.payload(key)
        self.store.commit(reserved.ticket)

    def read(self, chain):
        """Return how many blocks landed, every byte of them right."""
        fetched = self.store.fetch(self.world, chain, 10.0)
        for key, place in zip(chain, fetched.places, strict=False):
            assert self.slot(place) == self.payload(key), f"block {key.hex()}"
        self.store.release(fetched.lease)
        return len(fetched.places)


def kill_while_living(campaign, process, heard):
    """Kill at a random moment, mostly after it has read; return how many chains it began."""
    if campaign.random.random() < 0.8:
        assert select.select([heard], [], [], 60)[0]
    time.sleep(campaign.random.uniform(0, 0.12))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    lines = heard.read().decode().splitlines()
    assert [line for line in lines if line.startswith("wrong")] == []
    campaign.read += sum(int(line.split()[1]) for line in lines if line.startswith("read"))
    return lines.count("save")
