"""A session speaks tokens and blocks, and refuses what does not fit."""

import math
import threading

import numpy as np
import pytest

import holdfast
from holdfast.errors import BlockError, ConfigError, Outcome
from holdfast.store.store import Store
from holdfast.testing.embedded import fingerprint_for
from holdfast.testing.memory import SharedMemoryTier
from holdfast.testing.store_view import StoreView

LAYOUT = holdfast.Layout.portable(
    layers=2, kv_heads=2, head_size=16, dtype="float16", block_tokens=32
)
FINGERPRINT = fingerprint_for(LAYOUT)


@pytest.fixture
def store():
    with holdfast.open(host="16 MiB") as opened:
        yield opened


def blocks_for(count: int, seed: int = 0) -> np.ndarray:
    shape = (count, LAYOUT.raw_bytes // 2)
    return np.random.default_rng(seed).integers(0, 9_999, shape).astype(np.float16)


def test_blocks_of_any_dtype_come_back_as_they_were(store) -> None:
    session, tokens, blocks = store.session(FINGERPRINT), list(range(100)), blocks_for(3)
    assert session.save(tokens, blocks) == 3
    found = np.zeros_like(blocks)
    landed = session.fetch(tokens, into=found)
    assert (landed.tokens, landed.blocks, landed.outcome) == (96, 3, Outcome.OK)
    assert landed.sources == {"host": 3}
    assert (found == blocks).all()


def test_a_fetch_of_a_longer_context_fills_its_prefix_and_leaves_the_other_rows(store) -> None:
    session, blocks = store.session(FINGERPRINT), blocks_for(5)
    session.save(list(range(96)), blocks[:3])
    found = np.full_like(blocks, 7)
    landed = session.fetch(list(range(160)), into=found)
    assert landed.blocks == 3
    assert (found[:3] == blocks[:3]).all()
    assert (found[3:] == 7).all()
    assert session.cover(list(range(160))) == 96


def test_rows_after_the_held_prefix_are_unchanged_even_if_the_lease_ends(
    store, monkeypatch
) -> None:
    """The rows of the prefix may have been written when the lease turns out to have ended."""
    session, blocks = store.session(FINGERPRINT), blocks_for(5)
    session.save(list(range(96)), blocks[:3])
    found = np.full_like(blocks, 7)
    release = store.release
    monkeypatch.setattr(store, "release", lambda lease: not release(lease))
    landed = session.fetch(list(range(160)), into=found)
    assert (landed.blocks, landed.outcome) == (0, Outcome.LATE)
    assert (found[3:] == 7).all()
    assert "may have changed" in session.fetch.__doc__


def test_contexts_of_another_fingerprint_are_not_covered(store) -> None:
    store.session(FINGERPRINT).save(list(range(64)), blocks_for(2))
    other = fingerprint_for(LAYOUT, "n")
    assert store.session(other).cover(list(range(64))) == 0


def test_fewer_tokens_than_a_block_save_nothing_and_are_a_miss(store) -> None:
    session = store.session(FINGERPRINT)
    assert session.save([1, 2, 3], blocks_for(0)) == 0
    assert session.fetch([1, 2, 3], into=blocks_for(0)).outcome is Outcome.MISS


def test_rows_of_a_wrong_number_or_size_are_refused_with_both_numbers(store) -> None:
    session = store.session(FINGERPRINT)
    with pytest.raises(BlockError, match="2 blocks given, but the tokens fill 3"):
        session.save(list(range(96)), blocks_for(2))
    with pytest.raises(BlockError, match=f"the layout says {LAYOUT.raw_bytes}"):
        session.save(list(range(96)), blocks_for(3)[:, :-1].copy())
    with pytest.raises(BlockError, match="contiguous"):
        session.save(list(range(96)), np.asfortranarray(blocks_for(3)))
    assert session.cover(list(range(96))) == 0


def test_an_unknown_domain_is_refused_by_name(store) -> None:
    with pytest.raises(ConfigError, match="'acme' is not configured; known: default; ask for"):
        store.session(FINGERPRINT, domain="acme")


def test_a_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="disk and path go together"):
        holdfast.open(host="16 MiB", disk="1 GiB")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"path": "somewhere"}, "disk and path go together"),
        ({"path": ""}, "disk and path go together"),
        ({"host": "16 MiB", "path": "somewhere"}, "disk and path go together"),
        ({"disk": "1 GiB", "path": ""}, "path is empty"),
        ({"host": 0}, r"tiers\.0\.capacity"),
        ({"host": ""}, r"tiers\.0\.capacity"),
        ({"host": "16 MiB", "disk": 0, "path": "somewhere"}, r"tiers\.1\.capacity"),
        ({"file": "host.yaml", "path": "somewhere"}, "a file or sizes, not both"),
        ({"file": "host.yaml", "host": 0}, "a file or sizes, not both"),
    ],
)
def test_invalid_arguments_of_open_are_refused_and_not_ignored(
    sizes, words, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=words):
        holdfast.open(**sizes).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan"), -1.0, 1e300])
def test_deadlines_out_of_range_are_refused_and_nothing_is_leased(store, deadline_s) -> None:
    session = store.session(FINGERPRINT)
    session.save(list(range(96)), blocks_for(3))
    with pytest.raises(BlockError, match=r"deadline_s: .* is not from 0 to 86400 seconds"):
        session.fetch(list(range(96)), into=blocks_for(3), deadline_s=deadline_s)
    assert not StoreView(store).leases


def test_an_interrupted_fetch_leaks_no_lease(store, monkeypatch) -> None:
    session, blocks = store.session(FINGERPRINT), blocks_for(3)
    session.save(list(range(96)), blocks)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.store.session.payload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.fetch(list(range(96)), into=blocks)
    assert not StoreView(store).leases


def test_read_only_memory_can_be_saved_and_is_refused_as_a_fetch_target(store) -> None:
    session, blocks = store.session(FINGERPRINT), blocks_for(3)
    blocks.flags.writeable = False
    assert session.save(list(range(96)), blocks) == 3
    with pytest.raises(BlockError, match="`into` is read-only; pass memory that can be written"):
        session.fetch(list(range(96)), into=blocks)
    assert not StoreView(store).leases
    found = np.zeros_like(blocks)
    assert session.fetch(list(range(96)), into=found).blocks == 3
    assert (found == blocks).all()


def test_a_matrix_is_saved_by_its_rows(store) -> None:
    session, blocks = store.session(FINGERPRINT), blocks_for(3)
    assert session.save(list(range(96)), blocks.view(np.matrix)) == 3
    found = np.zeros_like(blocks)
    session.fetch(list(range(96)), into=found)
    assert (found == blocks).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_tensors_are_taken_and_filled_in_place(store, dtype) -> None:
    torch = pytest.importorskip("torch")
    session, numbers = store.session(FINGERPRINT), blocks_for(3)
    blocks = torch.from_numpy(numbers).view(getattr(torch, dtype))
    tokens = torch.arange(96)
    assert session.save(tokens, blocks) == 3
    found = torch.zeros_like(blocks)
    assert session.fetch(list(range(96)), into=found).blocks == 3
    assert torch.equal(found.view(torch.uint8), blocks.view(torch.uint8))
    with pytest.raises(BlockError, match=r"contiguous; pass blocks\.contiguous"):
        session.save(tokens, blocks.T.contiguous().T)
    with pytest.raises(BlockError, match="torch tensor on meta"):
        session.save(tokens, blocks.to("meta"))


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (np.ma.masked_array(blocks_for(3)), "blocks are a masked numpy array"),
        (blocks_for(3).tolist(), "of type list; pass a numpy array or a torch tensor"),
        (list(blocks_for(3)), r"for example numpy\.stack"),
        (blocks_for(3).tobytes(), "of type bytes"),
        (memoryview(blocks_for(3)), "of type memoryview"),
        (None, "of type NoneType"),
        (np.array(1.0), "no rows of blocks given, but the tokens fill 3"),
        (np.zeros((3, 4), dtype=object), "dtype object, which holds references"),
    ],
    ids=["masked", "list", "rows", "bytes", "memoryview", "None", "0-d", "object"],
)
def test_objects_without_rows_of_memory_are_refused_by_name(store, blocks, words) -> None:
    session = store.session(FINGERPRINT)
    with pytest.raises(BlockError, match=words):
        session.save(list(range(96)), blocks)
    with pytest.raises(BlockError, match=words):
        session.fetch(list(range(96)), into=blocks)
    assert not StoreView(store).leases
    assert not StoreView(store).reservations


def test_a_bytes_object_is_refused_as_tokens(store) -> None:
    session = store.session(FINGERPRINT)
    with pytest.raises(BlockError, match="tokens are of type bytes"):
        session.save(bytes([1, 0, 0, 0] * 32), blocks_for(1))
    with pytest.raises(BlockError, match="tokens are of type bytes"):
        session.cover(bytes([1, 0, 0, 0] * 32))
    assert session.fetch([1] * 32, into=blocks_for(1)).blocks == 0


class Silent(SharedMemoryTier):
    """A shared tier that answers no question before it is told to, whatever it is allowed."""

    def __init__(self, records) -> None:
        super().__init__(records)
        self.told, self.asked = threading.Event(), 0

    def held(self, namespace, keys, start, within_s=math.inf):
        self.asked += 1
        self.told.wait(60)
        return super().held(namespace, keys, start, within_s)


@pytest.fixture
def far():
    """What shared tiers hold: three blocks of a context that another store saved."""
    records = {}
    with Store(16 << 20, [SharedMemoryTier(records)], {"default": b"s" * 32}) as writer:
        writer.start()
        writer.session(FINGERPRINT).save(list(range(96)), blocks_for(3))
    assert len(records) == 3
    return records


@pytest.fixture
def over():
    """Call with shared tiers for a store over them; all are closed with the test."""
    opened = []

    def make(*tiers):
        opened.append(Store(16 << 20, tiers, {"default": b"s" * 32}))
        opened[-1].start()
        return opened[-1].session(FINGERPRINT)

    yield make
    for one in opened:
        one.close()


def test_a_tier_that_ignores_its_deadline_delays_a_call_to_the_deadline_only(far, over) -> None:
    session, found = over(tier := Silent(far)), blocks_for(3, seed=9)
    session.save(list(range(32)), blocks_for(3)[:1])
    assert session.cover(list(range(96)), deadline_s=0.05) == 32
    landed = session.fetch(list(range(96)), into=found, deadline_s=0.1)
    assert (landed.blocks, landed.outcome) == (1, Outcome.LATE), landed
    assert landed.reason.endswith("; shared memory did not answer in time")
    assert session.prestage(list(range(96)), deadline_s=0.05) == 32
    assert session.pin(list(range(96)), ttl_s=9.0, deadline_s=0.1) == 32
    tier.told.set()
    while (landed := session.fetch(list(range(96)), into=found)).blocks != 3:
        assert landed.outcome is Outcome.LATE
    assert (found == blocks_for(3)).all()


def test_a_context_held_locally_causes_no_shared_tier_lookup(over) -> None:
    session, blocks = over(tier := Silent({})), blocks_for(3)
    session.save(list(range(96)), blocks)
    assert session.cover(list(range(100))) == 96
    assert session.fetch(list(range(96)), into=blocks).outcome is Outcome.OK
    assert session.prestage(list(range(96))) == 96
    assert tier.asked == 0
    assert session.cover(list(range(128)), deadline_s=0.0) == 96
    assert tier.asked == 0, "no time was left to ask"
    tier.told.set()


def test_a_miss_reports_that_nothing_is_held(over, far) -> None:
    session, found = over(SharedMemoryTier(far)), blocks_for(3)
    landed = session.fetch([1] * 96, into=found)
    assert (landed.outcome, landed.reason) == (Outcome.MISS, "nothing is held here")


def test_a_later_tier_is_asked_for_blocks_missing_from_the_first(over, far) -> None:
    session = over(SharedMemoryTier({}, "pool"), SharedMemoryTier(far, "valkey"))
    found = np.zeros_like(blocks_for(3))
    assert session.fetch(list(range(96)), into=found).sources == {"valkey": 3}
    assert (found == blocks_for(3)).all()


def test_cover_deadlines_out_of_range_are_refused(store) -> None:
    with pytest.raises(BlockError, match="cover: deadline_s: nan is not from 0"):
        store.session(FINGERPRINT).cover([1], deadline_s=math.nan)
