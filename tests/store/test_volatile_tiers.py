"""CXL memory in a store: a copy that forgets with its process never stands for one that lasts."""

import os
import time

import numpy as np
import pytest

from holdfast.assemble import open_store
from holdfast.codec.pack import payload
from holdfast.config import parse
from holdfast.policy.admit import SecondTouch
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import payload_of
from holdfast.testing.store_control import leave
from holdfast.testing.store_view import StoreView
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier
from holdfast_bench.campaigns.contexts import Contexts, chain_of

MIB = 1 << 20
BLOCK = 16 << 10


class Slow(MemoryTier):
    """A tier that writes nothing until it is let."""

    held = True

    def write(self, batch):
        while self.held:
            time.sleep(0.002)
        return super().write(batch)


class Ladder:
    """Host, CXL and a lasting tier, with contexts whose every byte is checked."""

    def __init__(self, disk=None, cxl_bytes=16 * MIB, rule=None):
        self.disk = disk or MemoryTier(64 * MIB, name="disk")
        self.cxl = CxlTier(CxlOptions(capacity=cxl_bytes))
        rules = {2: TierRules(lambda _: rule)} if rule else {}
        options = StoreOptions(rules=rules)
        self.store = Store(MIB, [self.cxl, self.disk], {"default": b"s" * 32}, options)
        self.store.start()
        self.contexts = Contexts(self.store, BLOCK)

    def save(self, *chains):
        for chain in chains:
            self.contexts.save(chain)
            self.contexts.wait_written()

    def off(self, chain, *tiers):
        """Take a chain off tiers: 0 is the host, 1 CXL, 2 the disk."""
        leave(self.store, self.contexts.namespace, chain, *tiers)

    def on(self, chain, tier):
        return StoreView(self.store).held(self.contexts.namespace, chain, tier)


@pytest.fixture
def ladder(monkeypatch):
    """Call for a ladder; nobody reads from it but the test."""
    monkeypatch.setattr("holdfast.store.store.unmeasured_tiers", lambda _: [])
    made = []

    def make(**given):
        made.append(Ladder(**given))
        return made[-1]

    yield make
    for one in made:
        if isinstance(one.disk, Slow):
            one.disk.held = False
        one.store.close()


def test_blocks_stay_in_memory_until_the_disk_has_written_them(ladder):
    one = ladder(disk=Slow(64 * MIB, name="disk"))
    chains = [chain_of(f"c{n}", 8) for n in range(20)]
    for chain in chains:
        one.contexts.save(chain)
    deadline = time.monotonic() + 60
    while any(one.on(chain, 0) > one.on(chain, 1) for chain in chains):
        assert time.monotonic() < deadline, "not all of memory has a copy on CXL"
        one.contexts.save(chain_of("more", 8))
    saved = [key for chain in chains for key in chain if one.on([key], 0) or one.on([key], 1)]
    one.disk.held = False
    one.contexts.wait_written()
    assert one.on(saved, 2) == len(saved) > 40


def test_blocks_promoted_from_the_disk_are_copied_to_cxl(ladder):
    one, chain = ladder(), chain_of("a", 8)
    one.save(chain)
    one.off(chain, 0, 1)
    assert one.contexts.read(chain) == 8
    one.contexts.wait_written()
    assert [one.on(chain, tier) for tier in range(3)] == [8, 8, 8]
    one.off(chain, 0, 2)
    assert one.contexts.read(chain) == 8
    assert one.cxl.usage().read_bytes == 8 * one.contexts.namespace.slot_bytes


def test_a_block_the_disk_declined_is_offered_again_when_it_is_promoted_from_cxl(ladder):
    one, chain = ladder(rule=SecondTouch(1_000)), chain_of("a", 8)
    one.save(chain)
    assert [one.on(chain, tier) for tier in range(3)] == [8, 8, 0]
    one.off(chain, 0)
    assert one.contexts.read(chain) == 8
    one.contexts.wait_written()
    assert one.on(chain, 2) == 8


def test_blocks_evicted_from_cxl_are_still_on_the_disk(ladder):
    one = ladder(cxl_bytes=2 * MIB)
    chains = [chain_of(f"c{n}", 16) for n in range(16)]
    one.save(*chains)
    assert sum(one.on(chain, 1) for chain in chains) < 16 * 16
    assert one.on([key for chain in chains for key in chain], 2) == 16 * 16
    for chain in chains:
        assert one.contexts.read(chain) == 16


def test_a_flipped_byte_in_cxl_memory_is_never_served(ladder):
    one, chain = ladder(), chain_of("a", 8)
    one.save(chain)
    one.off(chain, 0)
    place = StoreView(one.store).place(one.contexts.namespace, chain[3], 1)
    one.cxl._memory[place + 5_000] ^= 1
    assert one.contexts.read(chain) == 3
    fault = one.store.status().faults[-1]
    assert (fault.tier, fault.outcome) == ("cxl", "corrupt")
    assert one.contexts.read(chain) == 8, "the disk has it too"


@pytest.fixture
def configured(tmp_path):
    key = tmp_path / "team.key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)

    def configure(**team):
        tiers = [
            {"kind": "host", "capacity": 16 * MIB},
            {"kind": "cxl", "capacity": 16 * MIB, "node": "any"},
            {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": 64 * MIB},
        ]
        domains = {"team": {"key_file": str(key), **team}}
        return parse({"listen": f"{tmp_path}/node.sock", "tiers": tiers, "domains": domains})

    return configure


def test_a_domain_with_a_key_is_sealed_on_cxl_and_erased_there(configured):
    pytest.importorskip("cryptography")
    with open_store(configured()) as store:
        contexts, chain = Contexts(store, BLOCK, "team"), chain_of("a", 8)
        contexts.save(chain)
        contexts.wait_written()
        cxl = StoreView(store).tier(1)
        held = bytes(cxl._memory[: 8 * contexts.namespace.slot_bytes])
        assert payload_of(chain[0], BLOCK)[:64] not in held
        contexts.leave_host(chain)
        assert contexts.read(chain) == 8
        assert cxl.usage().read_bytes
        store.erase("team")
        assert cxl.usage().records == 0
        assert contexts.read(chain) == 0


def test_a_quota_holds_on_cxl_and_status_shows_it(configured):
    quota = {"host": 16 * MIB, "cxl": MIB}
    with open_store(configured(quota_bytes=quota)) as store:
        contexts = Contexts(store, BLOCK, "team")
        for number in range(12):
            contexts.save(chain_of(f"c{number}", 8))
            contexts.wait_written()
        (team,) = [d for d in store.status().domains if d.domain == "team"]
        assert 0 < team.used_bytes["cxl"] <= MIB == team.quota_bytes["cxl"]
        assert team.used_bytes["disk1"] == 96 * contexts.namespace.slot_bytes
        assert [tier.tier for tier in store.status().tiers] == [
            *["host"] * 2,
            "cxl",
            "disk1",
        ]


def test_verify_reads_cxl_and_drops_corrupt_copies(configured):
    with open_store(configured()) as store:
        contexts, chain = Contexts(store, BLOCK), chain_of("a", 8)
        contexts.save(chain)
        contexts.wait_written()
        assert store.verify()["checked"] == 3 * 8
        place = StoreView(store).place(contexts.namespace, chain[2], 1)
        payload(memoryview(StoreView(store).tier(1)._memory)[place:], BLOCK)[7] ^= 4
        assert store.verify()["bad"] == [{"tier": "cxl", "outcome": "corrupt"}]
        assert store.verify()["checked"] == 3 * 8 - 1


def test_after_a_restart_cxl_is_empty_and_the_disk_is_warm(configured):
    with open_store(configured()) as store:
        contexts, chain = Contexts(store, BLOCK), chain_of("a", 8)
        contexts.save(chain)
        contexts.wait_written()
    with open_store(configured()) as store:
        contexts = Contexts(store, BLOCK)
        contexts.await_recovery()
        assert StoreView(store).tier(1).usage().records == 0
        assert contexts.read(chain) == 8
        contexts.wait_written()
        assert StoreView(store).tier(1).usage().records == 8
        assert np.count_nonzero(StoreView(store).tier(1)._memory[: 8 * BLOCK])
