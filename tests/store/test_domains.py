"""Domains of a running store: a shared ring is followed, and without it nothing is served."""

import json

import pytest

from holdfast.errors import RefusedError
from holdfast.keys.audit import AuditLog
from holdfast.keys.keyring import KeyRing
from holdfast.limits import RING_STALE_S
from holdfast.store import domains
from holdfast.store.shared_ring import SharedRing
from holdfast.testing.memory import MemoryTier, SharedMemoryTier

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _patient_looks(monkeypatch):
    """A brief look waits for the end of its read, however busy the machine is."""
    monkeypatch.setattr("holdfast.keys.keyring_watch.LOOK_WAIT_S", 60.0)


@pytest.fixture
def sealed(harness, tmp_path):
    """Make stores whose domain is sealed under one ring file."""

    def make():
        ring = KeyRing(tmp_path / "ring.json")
        ring.enrol("default", b"s" * 32)
        audit = AuditLog(tmp_path / "audit.jsonl")
        return harness(tier=MemoryTier(32 * MIB), ring=ring, audit=audit)

    return make


def saved(one, seed=1):
    chain = one.chain(seed, 6)
    one.save(chain)
    one.flush()
    return chain


def actions(tmp_path):
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    return [json.loads(line)["action"] for line in lines]


def test_what_one_node_erases_all_that_share_the_ring_forget(sealed, tmp_path):
    one, other = sealed(), sealed()
    chain = saved(other)
    assert other.read(chain) == 6
    one.store.erase("default")
    other.store.shared_ring.follow()
    assert other.read(chain) == 0
    assert other.store.status().blocks == 0
    assert actions(tmp_path) == ["erase", "erased elsewhere"]


def test_no_hint_of_an_erased_domain_is_left(sealed):
    one = sealed()
    chain = saved(one)
    one.store.follow(one.namespace, "chat", chain.keys)
    assert one.store.pin(one.namespace, chain.keys, 100.0) == 6
    one.store.erase("default")
    hints = one.store.status().hints
    assert (hints.sessions, hints.prestaging, hints.pinned_bytes) == (0, 0, 0)


def test_a_ring_is_back_even_if_its_changes_cannot_be_applied(sealed, tmp_path, monkeypatch):
    one, backs = sealed(), []
    shared = SharedRing(one.store, lambda: backs.append("back"))
    ring = tmp_path / "ring.json"
    ring.rename(tmp_path / "away")
    one.clock.advance(RING_STALE_S + 1)
    shared.follow()
    assert shared.lost
    elsewhere = KeyRing(tmp_path / "away")
    elsewhere.enrol("default", b"s" * 32)
    elsewhere.erase("default")
    (tmp_path / "away").rename(ring)
    monkeypatch.setattr("holdfast.store.shared_ring.forget_erased", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shared.follow()
    assert not shared.lost
    assert backs == ["back"]


def test_a_ring_that_is_away_for_long_ends_serving_until_it_is_back(sealed, tmp_path):
    one = sealed()
    chain = saved(one)
    one.store.shared_ring.follow()
    ring = tmp_path / "ring.json"
    ring.rename(tmp_path / "away")
    one.clock.advance(RING_STALE_S - 1)
    one.store.shared_ring.follow()
    assert one.read(chain) == 6
    one.clock.advance(2)
    one.store.shared_ring.follow()
    assert one.read(chain) == 0
    assert one.save(one.chain(2, 3)) == 0, "nor is what is new"
    assert one.store.verify()["checked"] == 0
    (tmp_path / "away").rename(ring)
    one.store.shared_ring.follow()
    assert one.read(chain) == 6, "nobody took what could not be opened for damaged"
    again = saved(one, 3)
    domains.leave_memory(one.store, one.namespace.domain)
    assert one.read(again) == 6
    assert actions(tmp_path) == ["ring", "ring"]


def test_while_a_ring_is_away_nothing_that_others_can_open_is_condemned(harness, tmp_path):
    far = {}
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one = harness(tier=SharedMemoryTier(far), ring=ring)
    chain = saved(one)
    (tmp_path / "ring.json").rename(tmp_path / "away")
    one.clock.advance(RING_STALE_S + 1)
    one.store.shared_ring.follow()
    assert one.read(chain) == 0
    one.store.verify()
    assert len(far) == 6
    with pytest.raises(RefusedError, match="restore the file"):
        one.store.rotate("default")
    assert not (tmp_path / "ring.json").exists()


def test_what_comes_up_while_its_domain_is_erased_does_not_outlive_it(
    harness, tmp_path, monkeypatch
):
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one = harness(tier=SharedMemoryTier({}), ring=ring)
    chain, forget = saved(one), domains.forget_domain

    def forget_slowly(store, domain):
        blocks = forget(store, domain)
        one.store.look(one.namespace, chain.keys)
        one.read(chain)
        return blocks

    monkeypatch.setattr(domains, "forget_domain", forget_slowly)
    one.store.erase("default")
    assert one.read(chain) == 0


def test_a_damaged_ring_does_not_end_serving_at_once(sealed, tmp_path):
    one = sealed()
    chain = saved(one)
    (tmp_path / "ring.json").write_text("garbage")
    one.store.shared_ring.follow()
    assert one.read(chain) == 6
    with pytest.raises(Exception, match="damaged or not a key ring"):
        one.store.rotate("default")


def test_the_listing_names_domains_epochs_and_nothing_secret(sealed, tmp_path):
    one = sealed()
    one.store.rotate("default")
    listing = one.store.domains()
    (entry,) = listing["domains"]
    assert (entry["domain"], entry["sealed"], entry["configured"]) == ("default", True, True)
    assert [epoch["epoch"] for epoch in entry["epochs"]] == [1, 2]
    assert (b"s" * 32).hex() not in str(listing)


def test_an_erasure_says_so_where_a_key_that_it_dropped_was_derived(harness, tmp_path):
    KeyRing(tmp_path / "ring.json", derives=True).enrol("default", b"s" * 32)
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one = harness(tier=MemoryTier(32 * MIB), ring=ring)
    one.store.rotate("default")
    with pytest.raises(RefusedError, match="derived from the domain's key in epochs 1,"):
        one.store.retire("default")
    assert one.store.erase("default")["everywhere"] is False
    assert one.store.erase("default")["everywhere"] is True


def test_without_a_place_for_its_ring_a_pools_domain_is_not_erased(harness):
    ring = KeyRing(None, derives=True)
    ring.enrol("default", b"s" * 32)
    one = harness(tier=MemoryTier(32 * MIB), ring=ring)
    chain = saved(one)
    with pytest.raises(RefusedError, match="would not remember"):
        one.store.erase("default")
    assert one.read(chain) == 6


def tiers_of(one):
    namespaces = one.store.listing()
    return namespaces[0]["tiers"] if namespaces else {}


def test_retiring_is_refused_while_blocks_are_sealed_with_an_old_key(sealed):
    one = sealed()
    chain = saved(one)
    one.store.rotate("default")
    saved(one, 2)
    record = one.namespace.record_bytes
    said = rf"6 blocks held here are sealed with them \(memory 6 blocks, {6 * record} bytes\)"
    with pytest.raises(RefusedError, match=said):
        one.store.retire("default")
    one.leave_memory()
    found = one.store.would_retire("default")
    assert (found["retired"], found["blocks"], found["lost"]) == (1, 6, 6)
    assert found["tiers"] == {"memory": {"blocks": 6, "bytes": 6 * record}}
    assert one.read(chain) == 6, "nothing was changed"


def test_what_a_retired_key_sealed_leaves_the_index_and_its_tier_at_once(sealed, tmp_path, caplog):
    one = sealed()
    old = saved(one)
    one.store.rotate("default")
    new = saved(one, 2)
    one.leave_memory()
    caplog.set_level("WARNING")
    done = one.store.retire("default", allow_loss=True)
    assert (done["retired"], done["blocks"], done["lost"]) == (1, 6, 6)
    assert one.store.cover(one.namespace, old.keys).blocks == 0
    assert one.store.cover(one.namespace, new.keys).blocks == 6
    assert tiers_of(one)["memory"]["blocks"] == 6
    assert one.tier.usage().records == 6, "its places are free"
    assert one.read(new) == 6
    assert "default" in caplog.text
    assert "blocks=6 memory_blocks=6; 6 of the blocks have no other copy" in caplog.text
    assert actions(tmp_path) == ["rotate", "retire"]


def test_blocks_in_memory_outlive_the_key_and_are_sealed_again_with_the_newest(sealed):
    one = sealed()
    chain = saved(one)
    one.store.rotate("default")
    done = one.store.retire("default", allow_loss=True)
    assert (done["blocks"], done["lost"]) == (6, 0)
    assert one.read(chain) == 6
    one.leave_memory()
    assert one.read(chain) == 6, "from below, with the key that is left"
    one.leave_memory()
    one.store.rotate("default")
    assert one.store.would_retire("default")["blocks"] == 6, "sealed with the second key"


def test_what_another_node_retires_leaves_this_index_too(sealed, tmp_path):
    one, other = sealed(), sealed()
    chain = saved(other)
    other.leave_memory()
    one.store.rotate("default")
    assert one.store.retire("default")["retired"] == 1, "it holds nothing, so nobody is asked"
    other.store.shared_ring.follow()
    assert other.store.cover(other.namespace, chain.keys).blocks == 0
    assert other.store.listing() == []
    assert other.tier.usage().records == 0
    assert actions(tmp_path)[-1] == "retired elsewhere"


def test_a_retirement_while_the_ring_was_away_is_noticed(sealed, tmp_path):
    one, other = sealed(), sealed()
    chain = saved(other)
    other.leave_memory()
    ring = tmp_path / "ring.json"
    image = ring.read_bytes()
    ring.rename(tmp_path / "away")
    other.clock.advance(RING_STALE_S + 1)
    other.store.shared_ring.follow()
    assert other.store.cover(other.namespace, chain.keys).blocks == 6, "its keys may come back"
    ring.write_bytes(image)
    one.store.rotate("default")
    one.store.retire("default")
    other.store.shared_ring.follow()
    assert other.store.cover(other.namespace, chain.keys).blocks == 0


def test_a_block_that_was_being_written_with_a_key_that_went_is_written_again(sealed, monkeypatch):
    one = sealed()
    one.store.rotate("default")
    write, retired = one.tier.write, []

    def slowly(batch):
        outcomes = write(batch)
        if not retired:
            retired.append(one.store.rotate("default"))
            one.store.retire("default")
        return outcomes

    monkeypatch.setattr(one.tier, "write", slowly)
    chain = saved(one)
    one.leave_memory()
    assert retired
    assert one.read(chain) == 6


def test_what_a_shared_tier_has_can_not_be_counted_and_is_asked_about_again(harness, tmp_path):
    far = {}
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one = harness(tier=SharedMemoryTier(far), ring=ring)
    chain = saved(one)
    one.leave_memory()
    one.store.rotate("default")
    with pytest.raises(RefusedError, match="has sealed with them cannot be counted"):
        one.store.retire("default")
    done = one.store.retire("default", allow_loss=True)
    assert (done["blocks"], done["uncounted"]) == (0, [one.tier.name])
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert far == {}, "what this node wrote there is deleted"
    assert saved(one).keys == chain.keys
    one.leave_memory()
    assert one.read(chain) == 6


def test_an_erasure_says_what_it_takes_and_counts_it(sealed):
    one = sealed()
    saved(one)
    found = one.store.would_erase("default")
    size = {"blocks": 6, "bytes": 6 * one.namespace.record_bytes}
    assert found["tiers"] == {"host": size, "memory": size}
    done = one.store.erase("default")
    assert (done["blocks"], done["tiers"]) == (6, found["tiers"])
