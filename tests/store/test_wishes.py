"""What is known of sessions is bounded, and the one used longest ago is forgotten first."""

from holdfast.blocks.world import World
from holdfast.store import wishes
from holdfast.store.wishes import Wishes

WORLD = World(b"f" * 16, b"d" * 16, 4096, 16)


def test_the_session_used_longest_ago_goes_first(monkeypatch) -> None:
    monkeypatch.setattr(wishes, "KEYS_BYTES_MAX", 64)
    known = Wishes()
    for name in ("a", "b", "a", "c"):
        known.follow(WORLD, name, [b"k" * 16, b"l" * 16])
    assert known.chain(WORLD.domain, "b") is None
    assert known.chain(WORLD.domain, "a").split() == [b"k" * 16, b"l" * 16]
    known.forget(WORLD.domain, "a")
    known.forget(WORLD.domain, "a")
    assert known.status(0.0) == {"sessions": 1, "prestaging": 0, "pinned_bytes": 0}


def test_due_chains_come_in_the_order_of_their_times() -> None:
    known = Wishes()
    chains = [wishes.Staging(wishes.Chain(WORLD, bytes([i]) * 16), 9.0) for i in range(3)]
    for at_s, chain in zip((3.0, 1.0, 2.0), chains, strict=True):
        assert known.wait(at_s, chain)
    assert known.due(2.5) == [chains[1], chains[2]]
    assert known.due(2.5) == []
    assert known.due(3.0) == [chains[0]]


def test_pins_count_until_they_end() -> None:
    known = Wishes()
    known.pin(10.0, 100)
    known.pin(20.0, 10)
    assert [known.pinned_bytes(at_s) for at_s in (0.0, 10.0, 20.0)] == [110, 10, 0]


def test_so_much_waits_and_so_many_are_begun_at_once(monkeypatch) -> None:
    monkeypatch.setattr(wishes, "KEYS_BYTES_MAX", 160)
    monkeypatch.setattr(wishes, "BEGUN_MAX", 2)
    known = Wishes()
    staging = wishes.Staging(wishes.Chain(WORLD, b"k" * 32), 9.0)
    assert [known.wait(1.0, staging) for _ in range(6)] == [True] * 5 + [False]
    assert len(known.due(2.0)) == 2
    assert known.due(2.0) == []
    assert known.wait(1.0, staging), "what has begun waits no longer"
    known.done()
    assert len(known.due(2.0)) == 1


def test_a_pin_that_came_to_less_counts_for_less() -> None:
    known = Wishes()
    first, second = known.pin(10.0, 100), known.pin(10.0, 50)
    known.repin(first, 20.0, 30)
    known.repin(second, 20.0, 0)
    assert known.pinned_bytes(15.0) == 30
    assert len(known._pins) == 1
