"""A domain that quantises: only with a record; one value on every tier; never an exact hit."""

import itertools

import msgspec
import numpy as np
import pytest

from holdfast.blocks.envelope import stored_bytes
from holdfast.blocks.layout import Layout, QuantisedLayout
from holdfast.codec.codec import CodecMode
from holdfast.codec.int8 import Int8, coded_bytes
from holdfast.errors import RefusedError
from holdfast.keys.keyring import KeyRing
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.embedded import fingerprint_for
from holdfast.testing.gates import permit
from holdfast.testing.store_view import StoreView
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

MIB = 1 << 20
LAYOUT = Layout.portable(layers=2, kv_heads=2, head_size=32, dtype="float16", block_tokens=64)
MODEL = fingerprint_for(LAYOUT)
SECRET, OTHER = b"s" * 32, b"o" * 32
BLOCKS = 4
TOKENS = list(range(BLOCKS * 64))


def blocks(seed=0):
    shape = BLOCKS, LAYOUT.raw_bytes // 2
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def kept(found):
    """What the codec keeps of blocks."""
    kept = found.copy()
    for block in kept:
        assert Int8(LAYOUT).quantised(memoryview(block.view(np.uint8)))
    return kept


def encode(block):
    """The codes of a quantised block, as a tier stores them."""
    into = memoryview(bytearray(coded_bytes(LAYOUT)))
    assert Int8(LAYOUT).encode(memoryview(block.view(np.uint8)), into, 2) == len(into)
    return bytes(into)


@pytest.fixture
def opened(tmp_path):
    """Open stores over one disk; the domain `acme` quantises, `exact` does not."""
    stores = []

    def make(codec: CodecMode = "off", **options):
        tier = DiskTier(DiskConfig(path=str(tmp_path / "disk"), capacity_bytes=32 * MIB))
        rules = {1: TierRules(codec=codec)}
        given = {"quantise": ["acme"], "gates": tmp_path / "gates", "rules": rules, **options}
        domains = {"acme": SECRET, "exact": OTHER}
        store = Store(16 * MIB, [tier], domains, StoreOptions(**given))
        store.start()
        store.recovery.wait()
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def gates(tmp_path):
    return tmp_path / "gates"


def fetched(session, into=None):
    found = np.zeros_like(blocks()) if into is None else into
    landed = session.fetch(TOKENS, into=found)
    return landed, found


def written(store):
    """Wait until every block is on the disk."""
    StoreView(store).wait_until_written()


def test_without_a_record_blocks_stay_exact_and_the_log_shows_the_command(opened, gates, caplog):
    store = opened()
    session = store.session(MODEL, "acme")
    assert session.namespace.fingerprint == MODEL.digest()
    session.save(TOKENS, blocks())
    assert (fetched(session)[1] == blocks()).all()
    quantised = MODEL.quantised("int8", 1).digest().hex()
    assert (
        f"domains.acme.quantise: no gate record permits int8 for fingerprint {quantised}: "
        f"'{gates}/{quantised}.json' does not exist; blocks stay exact. Run: holdfast judge int8 "
        f"--model FOLDER --prompts FILE --fingerprint {quantised} --domain acme --dtype float16 "
        "--block-tokens 64"
    ) in caplog.text
    assert store.status().quantise.refusals == 1


def test_every_tier_gives_the_values_that_the_codec_keeps(opened, gates):
    permit(gates, SECRET, MODEL)
    store = opened()
    session = store.session(MODEL, "acme")
    assert session.save(TOKENS, blocks()) == BLOCKS
    landed, found = fetched(session)
    assert landed.sources == {"host": BLOCKS}
    assert (found == kept(blocks())).all()
    assert not (found == blocks()).all()
    written(store)
    store.close()
    landed, found = fetched(opened().session(MODEL, "acme"))
    assert landed.sources == {"disk": BLOCKS}
    assert (found == kept(blocks())).all()


@pytest.mark.parametrize("mode", ["off", "auto", "planes"])
def test_below_memory_a_quantised_block_is_its_codes_whatever_the_tiers_codec(opened, gates, mode):
    permit(gates, SECRET, MODEL)
    store = opened(mode)
    session = store.session(MODEL, "acme")
    session.save(TOKENS, blocks())
    written(store)
    [codec] = store.status().codecs
    assert (codec.encoded, codec.quantised, codec.mismatches) == (BLOCKS, BLOCKS, 0)
    assert codec.stored_bytes == BLOCKS * stored_bytes(coded_bytes(LAYOUT))
    assert codec.raw_bytes == BLOCKS * stored_bytes(LAYOUT.raw_bytes)
    store.close()
    reopened = opened(mode)
    landed, found = fetched(reopened.session(MODEL, "acme"))
    assert landed.sources == {"disk": BLOCKS}
    assert (found == kept(blocks())).all()
    [codec] = reopened.status().codecs
    assert (codec.decoded, codec.undecodable) == (BLOCKS, 0)


@pytest.mark.parametrize(("mode", "encoded"), [("off", 3), ("planes", 4)])
def test_a_block_that_stayed_exact_is_stored_as_the_tiers_codec_says(opened, gates, mode, encoded):
    permit(gates, SECRET, MODEL)
    store, rows = opened(mode), blocks()
    rows[1] = 0  # shrinks well
    rows[1, 7] = np.inf
    store.session(MODEL, "acme").save(TOKENS, rows)
    written(store)
    [codec] = store.status().codecs
    assert (codec.encoded, codec.quantised, codec.mismatches) == (encoded, 3, 0)
    store.close()
    found = fetched(opened(mode).session(MODEL, "acme"))[1]
    assert (found[1] == rows[1]).all()
    assert (found[[0, 2, 3]] == kept(rows[[0, 2, 3]])).all()


def test_codes_of_a_sealed_domain_are_sealed(opened, gates, tmp_path):
    pytest.importorskip("cryptography")
    permit(gates, SECRET, MODEL)

    def ring():
        found = KeyRing(tmp_path / "ring.json")
        found.enrol("acme", SECRET)
        return found

    store = opened(ring=ring())
    store.session(MODEL, "acme").save(TOKENS, blocks())
    written(store)
    assert store.status().codecs[0].quantised == BLOCKS
    store.close()
    landed, found = fetched(opened(ring=ring()).session(MODEL, "acme"))
    assert landed.sources == {"disk": BLOCKS}
    assert (found == kept(blocks())).all()


def test_damaged_codes_on_a_disk_are_a_miss(opened, gates, tmp_path):
    permit(gates, SECRET, MODEL)
    store = opened()
    store.session(MODEL, "acme").save(TOKENS, blocks())
    written(store)
    store.close()
    file = tmp_path / "disk" / "blocks.holdfast"
    data = bytearray(file.read_bytes())
    codes = encode(kept(blocks())[2])
    at = bytes(data).index(codes)
    data[at + len(codes) // 2] ^= 1
    file.write_bytes(data)
    landed, found = fetched(opened().session(MODEL, "acme"))
    assert landed.blocks == 2
    assert (found[:2] == kept(blocks())[:2]).all()


def test_a_quantised_block_never_meets_an_exact_one(opened, gates):
    exact = opened(quantise=[])
    assert exact.session(MODEL, "acme").save(TOKENS, blocks()) == BLOCKS
    written(exact)
    exact.close()
    permit(gates, SECRET, MODEL)
    store = opened()
    session = store.session(MODEL, "acme")
    assert session.cover(TOKENS) == 0
    assert session.save(TOKENS, blocks()) == BLOCKS
    store.close()
    assert opened(quantise=[]).session(MODEL, "acme").cover(TOKENS) == len(TOKENS)


def test_another_domain_of_the_store_keeps_exact_blocks(opened, gates):
    permit(gates, SECRET, MODEL)
    session = opened().session(MODEL, "exact")
    session.save(TOKENS, blocks())
    assert (fetched(session)[1] == blocks()).all()


def test_a_block_with_a_value_out_of_range_is_kept_exact_and_counted(opened, gates):
    permit(gates, SECRET, MODEL)
    store = opened()
    session, rows = store.session(MODEL, "acme"), blocks()
    rows[1, 7] = np.inf
    session.save(TOKENS, rows)
    found = fetched(session)[1]
    assert (found[1] == rows[1]).all()
    assert (found[[0, 2, 3]] == kept(rows[[0, 2, 3]])).all()
    status = store.status().quantise
    assert (status.quantised, status.left_exact) == (3, 1)
    assert status.raw_bytes == 3 * LAYOUT.raw_bytes
    assert status.domains == ["acme"]


def test_what_was_fetched_and_is_saved_again_in_another_domain_keeps_its_values(opened, gates):
    permit(gates, SECRET, MODEL)
    store = opened(quantise=["acme", "exact"])
    store.session(MODEL, "acme").save(TOKENS, blocks())
    once = fetched(store.session(MODEL, "acme"))[1]
    permit(gates, OTHER, MODEL)
    store.session(MODEL, "exact").save(TOKENS, once)
    assert (fetched(store.session(MODEL, "exact"))[1] == once).all()


def test_slices_of_ranks_are_quantised_as_one_block(opened, gates):
    permit(gates, SECRET, MODEL)
    store, whole = opened(), blocks().reshape(BLOCKS, 2, 2, 2, -1)
    for rank in range(2):
        session = store.session(MODEL, "acme", LAYOUT.rank(rank, 2))
        rows = np.ascontiguousarray(whole[:, :, :, rank]).reshape(BLOCKS, -1)
        session.save(TOKENS, rows)
    assert (fetched(store.session(MODEL, "acme"))[1] == kept(blocks())).all()


def test_a_session_may_name_quantised_blocks_itself_if_they_are_permitted(opened, gates):
    quantised = MODEL.quantised("int8", 1)
    store = opened()
    with pytest.raises(RefusedError, match="no gate record permits int8"):
        store.session(quantised, "acme")
    permit(gates, SECRET, MODEL)
    store.session(quantised, "acme").save(TOKENS, blocks())
    assert (fetched(store.session(MODEL, "acme"))[1] == kept(blocks())).all()
    with pytest.raises(RefusedError, match="domain 'exact' stores exact blocks only"):
        store.session(quantised, "exact")
    with pytest.raises(RefusedError, match="this node has int8 version 1, not int8 version 2"):
        store.session(MODEL.quantised("int8", 2), "acme")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompts": 10}, "prompts is 10, fewer than 64"),
        ({"version": 2}, "it is of codec int8 version 2, not int8 1"),
        ({"model": "other weights"}, "the judged model is 'other weights', and the blocks are of"),
        (
            {"layout": Layout.portable(
                layers=2, kv_heads=2, head_size=32, dtype="bfloat16", block_tokens=64
            )},
            "it is of blocks of another layout",
        ),
    ],
)  # fmt: skip
def test_a_record_that_does_not_permit_this_codec_leaves_blocks_exact(
    opened, gates, caplog, changes, why
):
    permit(gates, SECRET, MODEL, **changes)
    session = opened().session(MODEL, "acme")
    assert session.namespace.fingerprint == MODEL.digest()
    assert why in caplog.text


def test_a_record_of_another_model_copied_to_this_ones_name_permits_nothing(opened, gates, caplog):
    of_another = permit(gates, SECRET, fingerprint_for(LAYOUT, model="another"))
    of_another.rename(gates / f"{MODEL.quantised('int8', 1).digest().hex()}.json")
    session = opened().session(MODEL, "acme")
    assert session.namespace.fingerprint == MODEL.digest()
    assert "it is of fingerprint" in caplog.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lambda data: data.replace(b'"prompts": 64', b'"prompts": 65'), "or was changed"),
        (lambda data: data[:-10], "not a gate record: Input data was truncated"),
        (lambda _: b"{}", "not a gate record: Object missing"),
        (lambda _: b"x" * 100_000, "cannot be read: more than 65536 bytes"),
    ],
)
def test_a_forged_or_damaged_record_permits_nothing(opened, gates, caplog, content, why):
    file = permit(gates, SECRET, MODEL)
    file.write_bytes(content(file.read_bytes()))
    session = opened().session(MODEL, "acme")
    assert session.namespace.fingerprint == MODEL.digest()
    assert why in caplog.text


def test_a_record_signed_with_another_domains_secret_permits_nothing(opened, gates, caplog):
    permit(gates, OTHER, MODEL)
    session = opened().session(MODEL, "acme")
    assert session.namespace.fingerprint == MODEL.digest()
    assert "it was not made with this domain's secret" in caplog.text


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (
            Layout.portable_latent(layers=2, latent_size=64, dtype="bfloat16", block_tokens=64),
            "domains.acme.quantise: layer 0: latents of MLA are stored exact",
        ),
        (
            Layout.portable(
                layers=1, kv_heads=1, head_size=64, dtype="float8_e4m3fn", block_tokens=64
            ),
            "dtype float8_e4m3fn cannot be quantised",
        ),
        (
            Layout.portable(layers=1, kv_heads=1, head_size=4, dtype="bfloat16", block_tokens=2),
            "a coded block takes 1.31 of its bytes, more than 0.95; blocks stay exact; raise block",
        ),
    ],
)
def test_a_layout_that_cannot_be_quantised_stays_exact_with_a_reason(opened, caplog, layout, why):
    model = fingerprint_for(layout)
    assert opened().session(model, "acme").namespace.fingerprint == model.digest()
    assert why in caplog.text


def test_the_quantised_fingerprint_differs_in_codec_and_version():
    found = [MODEL, MODEL.quantised("int8", 1), MODEL.quantised("int8", 2), MODEL.quantised("x", 1)]
    for one, other in itertools.combinations(found, 2):
        assert one.digest() != other.digest()
    again = msgspec.json.decode(msgspec.json.encode(found[1]), type=type(MODEL))
    assert again == found[1]
    assert isinstance(again.representation, QuantisedLayout)
    assert again.representation.exact == LAYOUT
