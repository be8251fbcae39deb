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


def test_a_domain_erased_by_one_node_is_erased_by_all_nodes_on_its_key_ring(sealed, tmp_path):
    one, other = sealed(), sealed()
    chain = saved(other)
    assert other.read(chain) == 6
    one.store.erase("default")
    other.store.shared_ring.follow()
    assert other.read(chain) == 0
    assert other.store.status().blocks == 0
    assert actions(tmp_path) == ["erase", "erased elsewhere"]


def test_an_erasure_removes_the_hints_of_the_domain(sealed):
    one = sealed()
    chain = saved(one)
    one.store.follow(one.namespace, "chat", chain.keys)
    assert one.store.pin(one.namespace, chain.keys, 100.0) == 6
    one.store.erase("default")
    hints = one.store.status().hints
    assert (hints.sessions, hints.prestaging, hints.pinned_bytes) == (0, 0, 0)


def test_a_key_ring_counts_as_readable_even_if_its_changes_cannot_be_applied(
    sealed, tmp_path, monkeypatch
):
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


def test_a_key_ring_that_is_missing_for_long_suspends_serving_until_it_is_back(sealed, tmp_path):
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


def test_a_node_without_its_key_ring_deletes_no_record_of_a_shared_tier(harness, tmp_path):
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


def test_blocks_promoted_during_an_erasure_are_erased_too(harness, tmp_path, monkeypatch):
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one = harness(tier=SharedMemoryTier({}), ring=ring)
    chain, forget = saved(one), domains.forget_domain

    def forget_slowly(store, domain):
        blocks = forget(store, domain)
        one.store.look(one.namespace, chain.keys, 60.0)
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


def test_an_erasure_reports_that_a_derived_key_still_exists_elsewhere(harness, tmp_path):
    KeyRing(tmp_path / "ring.json", derives=True).enrol("default", b"s" * 32)
    ring = KeyRing(tmp_path / "ring.json")
    ring.enrol("default", b"s" * 32)
    one = harness(tier=MemoryTier(32 * MIB), ring=ring)
    one.store.rotate("default")
    with pytest.raises(RefusedError, match="derived from the domain's key in epoch 1,"):
        one.store.retire("default")
    assert one.store.erase("default")["everywhere"] is False
    assert one.store.erase("default")["everywhere"] is True


def test_an_erasure_is_refused_if_the_key_ring_has_no_file(harness):
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
    record = one.namespace.slot_bytes
    said = rf"6 blocks held here are sealed with them \(memory 6 blocks, {6 * record} bytes\)"
    with pytest.raises(RefusedError, match=said):
        one.store.retire("default")
    one.leave_memory()
    found = one.store.would_retire("default")
    assert (found["retired"], found["blocks"], found["lost"]) == (1, 6, 6)
    assert found["tiers"] == {"memory": {"blocks": 6, "bytes": 6 * record}}
    assert one.read(chain) == 6, "nothing was changed"


def test_blocks_sealed_with_a_retired_key_leave_index_and_tier_at_once(sealed, tmp_path, caplog):
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


def test_blocks_in_memory_outlive_their_key_and_are_sealed_with_the_newest_key(sealed):
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


def test_blocks_of_a_key_retired_by_another_node_leave_this_index(sealed, tmp_path):
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


def test_a_key_retired_while_the_key_ring_was_missing_is_noticed(sealed, tmp_path):
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


def test_a_block_whose_key_is_retired_during_its_write_is_written_again(sealed, monkeypatch):
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


def test_a_retirement_cannot_count_blocks_of_a_shared_tier_and_clears_their_lookups(
    harness, tmp_path
):
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


def test_an_erasure_reports_the_blocks_and_bytes_it_removes(sealed):
    one = sealed()
    saved(one)
    found = one.store.would_erase("default")
    size = {"blocks": 6, "bytes": 6 * one.namespace.slot_bytes}
    assert found["tiers"] == {"host": size, "memory": size}
    done = one.store.erase("default")
    assert (done["blocks"], done["tiers"]) == (6, found["tiers"])
