"""The key ring: survives restarts and other nodes' changes; damage and foreign keys are refused."""

import fcntl
import json

import msgspec
import pytest

from holdfast.blocks.namespace import domain_id
from holdfast.errors import ConfigError, FormatError, RefusedError
from holdfast.keys import keyring_file
from holdfast.keys.keyring import EPOCHS_AHEAD, KeyRing

SECRET, OTHER = b"a" * 32, b"b" * 32
DOMAIN = domain_id(SECRET)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keyring.json"


def ring(path, name="acme", secret=SECRET, *, derives=False):
    made = KeyRing(path, derives=derives)
    made.enrol(name, secret)
    return made


def names(ring, domain=DOMAIN):
    """Epoch and key id of every data key."""
    return [(key.epoch, key.key_id) for key in ring._keys[domain].values()]


def test_data_keys_survive_a_restart(path):
    first = ring(path)
    first.rotate("acme")
    assert [epoch for epoch, _ in names(first)] == [1, 2]
    again = KeyRing(path)
    assert again.enrol("acme", SECRET) == ""
    assert names(again) == names(first)
    assert again.current(DOMAIN).epoch == 2


def test_a_key_ring_file_contains_no_secret_and_is_readable_by_its_user_only(path):
    made = ring(path)
    secret = bytes(made.current(DOMAIN)._secret)
    text = path.read_bytes()
    assert not any(each in text for each in (secret, secret.hex().encode()))
    assert not any(each in text for each in (SECRET, SECRET.hex().encode()))
    assert path.stat().st_mode & 0o077 == 0


def test_a_header_names_a_key_by_epoch_and_id(path):
    made = ring(path)
    key = made.current(DOMAIN)
    assert made.find(DOMAIN, key.epoch, key.key_id) is key
    assert made.find(DOMAIN, key.epoch, bytes(4)) is None
    assert made.find(DOMAIN, key.epoch + 1, key.key_id) is None
    assert made.find(domain_id(OTHER), key.epoch, key.key_id) is None


def test_epoch_numbers_are_never_reused(path):
    made = ring(path)
    old = made.current(DOMAIN)
    assert made.erase("acme") == (1, False)
    assert made.current(DOMAIN) is None, "until what it sealed is forgotten"
    made.erasures.done(DOMAIN, 1)
    assert made.current(DOMAIN).epoch == 2
    assert made.rotate("acme") == 3
    assert made.retire("acme") == 1
    assert [epoch for epoch, _ in names(made)] == [3]
    for known in (made, ring(path)):
        assert known.find(DOMAIN, old.epoch, old.key_id) is None


def test_an_erased_key_is_nowhere_in_the_file(path):
    made = ring(path)
    wrapped = json.loads(path.read_text())["domains"][DOMAIN.hex()]["epochs"][0]["wrapped"]
    assert wrapped in path.read_text()
    made.erase("acme")
    assert all(wrapped not in file.read_text() for file in path.parent.iterdir())


def test_nodes_that_share_a_key_ring_see_each_others_changes(path):
    one, other = ring(path), ring(path)
    epoch = one.rotate("acme")
    assert other.current(DOMAIN).epoch == 1
    other.look()
    assert other.current(DOMAIN).epoch == epoch
    other.rotate("acme")
    one.erase("acme")
    assert [epoch for epoch, _ in names(one)] == [4]
    other.look()
    assert names(other) == names(one)
    assert other.erasures.pending() == {DOMAIN: 1}
    assert other.is_away(DOMAIN)
    other.erasures.done(DOMAIN, 1)
    assert other.erasures.pending() == {}
    assert other.current(DOMAIN).epoch == 4


def test_a_completed_erasure_does_not_complete_a_later_one(path):
    one, other = ring(path), ring(path)
    for times in (1, 2):
        one.erase("acme")
        other.look()
        assert other.erasures.seen[DOMAIN] == times
    other.erasures.done(DOMAIN, 1)
    assert other.current(DOMAIN) is None
    other.erasures.done(DOMAIN, 2)
    assert other.current(DOMAIN).epoch == 3


def test_a_change_does_not_undo_a_concurrent_change_of_another_node(path):
    one, other = ring(path), ring(path)
    one.erase("acme")
    other.rotate("acme")
    assert [epoch for epoch, _ in names(other)] == [2, 3]
    assert other.erasures.pending() == {DOMAIN: 1}


def test_a_domain_that_left_the_file_counts_as_erased(path):
    one = ring(path)
    ring(path.with_name("other"), "globex", OTHER)
    path.write_bytes(path.with_name("other").read_bytes())
    one.look()
    assert one.erasures.pending() == {DOMAIN: 1}
    assert one.current(DOMAIN) is None


def test_a_suspended_ring_opens_nothing_until_it_is_read_again(path):
    made = ring(path)
    key = made.current(DOMAIN)
    made.suspend()
    assert made.current(DOMAIN) is made.find(DOMAIN, 1, key.key_id) is None
    path.rename(path.with_name("away"))
    with pytest.raises(FileNotFoundError):
        made.look()
    path.with_name("away").rename(path)
    made.look()
    assert made.find(DOMAIN, 1, key.key_id).key_id == key.key_id


def test_derived_keys_are_the_same_without_a_common_file(path):
    one = ring(path, derives=True)
    other = ring(path.with_name("other"), derives=True)
    volatile = ring(None, derives=True)
    assert names(one) == names(other) == names(volatile)
    one.rotate("acme")
    key = one.current(DOMAIN)
    assert other.find(DOMAIN, 2, key.key_id).key_id == key.key_id
    assert other.find(DOMAIN, 2 + EPOCHS_AHEAD, key.key_id) is None


def test_a_dropped_derived_epoch_stays_dropped(path):
    made = ring(path, derives=True)
    old = made.current(DOMAIN)
    made.erase("acme")
    for known in (made, ring(path, derives=True)):
        assert known.find(DOMAIN, old.epoch, old.key_id) is None


def test_derived_keys_are_not_reported_as_destroyed(path):
    made = ring(path, derives=True)
    made.rotate("acme")
    with pytest.raises(RefusedError, match=r"'acme': .* in epoch 1, .*nothing was changed"):
        made.retire("acme")
    assert [epoch for epoch, _ in names(made)] == [1, 2]
    shared = ring(path)  # the same file, and now it is the pool's
    assert shared.rotate("acme") == 3
    with pytest.raises(RefusedError, match=r"in epochs 1, 2, so"):
        shared.retire("acme")
    assert shared.erase("acme") == (3, True)
    assert shared.erase("acme") == (1, False)
    assert ring(path.with_name("other"), derives=True).erase("acme") == (1, True)


def test_a_change_through_a_symbolic_link_changes_the_key_ring_it_points_to(path):
    ring(path)
    links = []
    for folder in ("one", "other"):
        links.append(path.with_name(folder) / "keyring.json")
        links[-1].parent.mkdir()
        links[-1].symlink_to(path)
    one, other = map(ring, links)
    old = other.current(DOMAIN)
    one.erase("acme")
    other.look()
    assert other.find(DOMAIN, old.epoch, old.key_id) is None
    assert links[0].is_symlink()
    assert not path.is_symlink()
    assert {file.name for file in links[0].parent.iterdir()} == {"keyring.json"}


def test_a_renamed_domain_keeps_its_keys(path):
    before = names(ring(path))
    made = KeyRing(path)
    assert made.enrol("acme-eu", SECRET) == "renamed from 'acme'"
    assert names(made) == before
    assert [entry["domain"] for entry in made.listing()] == ["acme-eu"]


def test_a_known_name_under_another_key_is_refused(path):
    ring(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"domains\.acme: .*keyring.json.* another key .*give"):
        KeyRing(path).enrol("acme", OTHER)
    assert path.read_bytes() == before


def damaged(text, change):
    data = json.loads(text)
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-30], "damaged or not a key ring"),
        (lambda text: "", "truncated"),
        (lambda text: text.replace('"epoch": 1', '"epoch": 9', 1), "checksum is wrong"),
        (lambda text: damaged(text, lambda d: d.update(format=2)), "format is 2, .* reads 1"),
        (lambda text: damaged(text, lambda d: d.update(more=1)), "unknown field"),
    ],
)
def test_a_damaged_key_ring_is_refused_and_not_changed(path, change, words):
    ring(path)
    text = change(path.read_text())
    path.write_text(text)
    with pytest.raises(FormatError, match=rf"^keyring: .*{words}.*; restore a copy, or"):
        KeyRing(path)
    assert path.read_text() == text


def test_a_wrapped_key_of_another_domain_is_refused(path):
    """Wrapped keys swapped between domains by somebody who knew how to compute the checksum."""
    made = ring(path)
    made.enrol("globex", OTHER)
    domains, _ = keyring_file.read(path)
    mine, theirs = DOMAIN.hex(), domain_id(OTHER).hex()
    swapped = {mine: domains[theirs], theirs: domains[mine]}
    swapped = {k: type(v)(domains[k].name, v.epochs, v.last) for k, v in swapped.items()}
    keyring_file.write(path, swapped)
    with pytest.raises(FormatError, match="'acme': the data key of epoch 1 is damaged, or wrapped"):
        KeyRing(path).enrol("acme", SECRET)


def test_a_change_fails_without_effect_if_the_key_ring_cannot_be_written(path):
    made = ring(path)
    before = names(made)
    made.path = path.with_name("nowhere") / "keyring.json"
    for change in (made.rotate, made.erase):
        with pytest.raises(RefusedError, match=r"cannot be written.*nothing was changed"):
            change("acme")
    assert names(made) == before


def test_a_change_is_refused_if_another_process_holds_the_lock_too_long(path, monkeypatch):
    made = ring(path)
    monkeypatch.setattr(keyring_file, "LOCK_S", 0.1)
    with path.with_name("keyring.json.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match=r"another process has held .*; nothing was changed"):
            made.rotate("acme")
    assert made.rotate("acme") == 2


def test_only_domains_with_data_keys_can_be_changed(path):
    with pytest.raises(RefusedError, match=r"'globex' has no data keys here; .*: acme"):
        ring(path).rotate("globex")


def test_reading_a_key_ring_writes_nothing(path, monkeypatch):
    ring(path)
    monkeypatch.setattr(keyring_file, "held_for_change", lambda _: pytest.fail("it is changed"))
    assert KeyRing(path).enrol("acme", SECRET) == ""


def test_the_listing_shows_no_key(path):
    made = ring(path)
    entry = json.dumps(made.listing())
    assert bytes(made.current(DOMAIN)._secret).hex() not in entry
    assert "wrapped" not in entry


def test_a_change_that_exceeds_the_maximum_key_ring_size_is_refused(path, monkeypatch):
    made = ring(path)
    monkeypatch.setattr(keyring_file, "RING_BYTES_MAX", path.stat().st_size + 100)
    with pytest.raises(RefusedError, match=r"the limit is \d+; nothing was changed; .*retire"):
        made.rotate("acme")
    assert names(ring(path)) == names(made)


def test_a_key_ring_with_one_damaged_key_does_not_count_as_read(path):
    one, other = ring(path, "acme"), ring(path, "globex", OTHER)
    one.enrol("globex", OTHER)
    lost = one.current(domain_id(OTHER))
    other.erase("globex")
    data = json.loads(path.read_text())
    epoch = data["domains"][DOMAIN.hex()]["epochs"][0]
    epoch["wrapped"] = epoch["wrapped"][::-1]
    domains = msgspec.convert(data["domains"], dict[str, keyring_file.RingDomain])
    data["check"] = keyring_file.check(domains)
    path.write_text(json.dumps(data))
    for _ in range(2):
        with pytest.raises(FormatError, match="damaged"):
            one.look()
    assert one.erasures.pending() == {domain_id(OTHER): 1}
    assert one.find(domain_id(OTHER), lost.epoch, lost.key_id) is None
