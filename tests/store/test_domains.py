"""Domains of a running store: a shared ring is followed, and without it nothing is served."""

import json

import pytest

from holdfast.errors import RefusedError
from holdfast.limits import RING_STALE_S
from holdfast.store import domains
from holdfast.store.audit import AuditLog
from holdfast.store.keyring import KeyRing
from holdfast.testing.memory import MemoryTier, SharedMemoryTier

MIB = 1 << 20


@pytest.fixture
def sealed(rig, tmp_path):
    """Make stores whose domain is sealed under one ring file."""

    def make():
        one = rig(tier=MemoryTier(32 * MIB))
        ring = KeyRing(tmp_path / "ring.json")
        ring.enrol("default", b"s" * 32)
        one.store.seal_with(ring)
        one.store.audit = AuditLog(tmp_path / "audit.jsonl")
        return one

    return make


def saved(one, seed=1):
    chain = one.chain(seed, 6)
    one.save(chain)
    one.settle()
    return chain


def actions(tmp_path):
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    return [json.loads(line)["action"] for line in lines]


def test_what_one_node_erases_all_that_share_the_ring_forget(sealed, tmp_path):
    one, other = sealed(), sealed()
    chain = saved(other)
    assert other.read(chain) == 6
    one.store.erase("default")
    domains.follow(other.store)
    assert other.read(chain) == 0
    assert other.store.status()["blocks"] == 0
    assert actions(tmp_path) == ["erase", "erased elsewhere"]


def test_a_ring_that_is_away_for_long_ends_serving_until_it_is_back(sealed, tmp_path):
    one = sealed()
    chain = saved(one)
    domains.follow(one.store)
    ring = tmp_path / "ring.json"
    ring.rename(tmp_path / "away")
    one.clock.advance(RING_STALE_S - 1)
    domains.follow(one.store)
    assert one.read(chain) == 6
    one.clock.advance(2)
    domains.follow(one.store)
    assert one.read(chain) == 0
    assert one.save(one.chain(2, 3)) == 0, "nor is what is new"
    assert one.store.verify()["checked"] == 0
    (tmp_path / "away").rename(ring)
    domains.follow(one.store)
    assert one.read(chain) == 6, "nobody took what could not be opened for damaged"
    again = saved(one, 3)
    domains.leave_memory(one.store, one.world.domain)
    assert one.read(again) == 6
    assert actions(tmp_path) == ["ring", "ring"]


def test_while_a_ring_is_away_nothing_that_others_can_open_is_condemned(rig, tmp_path):
    far = {}
    one = rig(tier=SharedMemoryTier(far))
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one.store.seal_with(ring)
    chain = saved(one)
    (tmp_path / "ring.json").rename(tmp_path / "away")
    one.clock.advance(RING_STALE_S + 1)
    domains.follow(one.store)
    assert one.read(chain) == 0
    one.store.verify()
    assert len(far) == 6
    with pytest.raises(RefusedError, match="put it back"):
        one.store.rotate("default")
    assert not (tmp_path / "ring.json").exists()


def test_what_comes_up_while_its_domain_is_erased_does_not_outlive_it(rig, tmp_path, monkeypatch):
    one = rig(tier=SharedMemoryTier({}))
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one.store.seal_with(ring)
    chain, forget = saved(one), domains.forget_domain

    def forget_slowly(store, domain):
        blocks = forget(store, domain)
        one.store.look(one.world, chain.keys)
        one.read(chain)
        return blocks

    monkeypatch.setattr(domains, "forget_domain", forget_slowly)
    one.store.erase("default")
    assert one.read(chain) == 0


def test_a_damaged_ring_does_not_end_serving_at_once(sealed, tmp_path):
    one = sealed()
    chain = saved(one)
    (tmp_path / "ring.json").write_text("garbage")
    domains.follow(one.store)
    assert one.read(chain) == 6
    with pytest.raises(Exception, match="damaged or no key ring"):
        one.store.rotate("default")


def test_the_listing_names_domains_epochs_and_nothing_secret(sealed, tmp_path):
    one = sealed()
    one.store.rotate("default")
    listing = one.store.domains()
    (entry,) = listing["domains"]
    assert (entry["domain"], entry["sealed"], entry["configured"]) == ("default", True, True)
    assert [epoch["epoch"] for epoch in entry["epochs"]] == [1, 2]
    assert (b"s" * 32).hex() not in str(listing)


def test_an_erasure_says_so_where_a_key_that_it_dropped_was_derived(rig, tmp_path):
    KeyRing(tmp_path / "ring.json", derives=True).enrol("default", b"s" * 32)
    one = rig(tier=MemoryTier(32 * MIB))
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one.store.seal_with(ring)
    one.store.rotate("default")
    with pytest.raises(RefusedError, match="follow from the domain's key in epochs 1,"):
        one.store.retire("default")
    assert one.store.erase("default")["everywhere"] is False
    assert one.store.erase("default")["everywhere"] is True


def test_without_a_place_for_its_ring_a_pools_domain_is_not_erased(rig):
    one = rig(tier=MemoryTier(32 * MIB))
    ring = KeyRing(None, derives=True)
    ring.enrol("default", b"s" * 32)
    one.store.seal_with(ring)
    chain = saved(one)
    with pytest.raises(RefusedError, match="would not remember"):
        one.store.erase("default")
    assert one.read(chain) == 6
