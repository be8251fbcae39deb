"""A real node learns from what it reads and hears, plans by it, and knows it after a restart."""

import contextlib

import pytest

from holdfast.errors import NodeGoneError, RefusedError
from holdfast.limits import OBSERVED_MAX
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

BLOCKS = 20
STEPS = [(new, 0.0, 5e-5 * new) for new in (64, 128, 512, 2048)]
"""A block takes this engine 6.4 ms to compute, and the disk 19 to read."""


def ask(engine, keys, have=0):
    return engine.call(m.Cover(b"".join(keys), BLOCKS * 128 + 10, have, 5.0))


@pytest.fixture
def slow(start_node, engine, names, tmp_path):
    """A node whose disk is slower than computing and holds a context, with nothing in memory."""
    tiers = [
        {"kind": "host", "capacity": 64 << 20},
        {"kind": "disk", "path": str(tmp_path / "d"), "capacity": 64 << 20, "read_limit": 1 << 20},
    ]
    node = start_node(tiers=tiers)
    first = engine(node.address)
    assert first.save(names("context", BLOCKS)) == BLOCKS
    first.until_on_disk(BLOCKS)
    assert node.stop() == 0
    return node.start()


def test_a_slow_disk_is_measured_before_the_first_lookup_and_remembered(slow, engine, names):
    keys = names("context", BLOCKS)
    one = engine(slow.address)
    one.until(lambda _: one.call(m.Plans()).data["tiers"][1]["reads"])
    one.call(m.Observed(STEPS))
    for start in range(2):
        known = ask(one, keys)
        assert (known.blocks, known.worth, known.sources) == (BLOCKS, 0, {}), start
        assert known.expected_s == known.recompute_s == pytest.approx(0.13, rel=0.1)
        assert "disk too slow" in known.reason
        assert slow.stop() == 0
        slow.start()
        one = engine(slow.address)
        one.until_recovered()


def test_a_lookup_excludes_blocks_of_the_engine_and_refuses_invalid_values(slow, engine, names):
    keys = names("context", BLOCKS)
    one = engine(slow.address)
    one.until_recovered()
    assert ask(one, keys, have=BLOCKS * 128 - 200).sources == {"disk": 2}
    for cover in (m.Cover(b"", 5, 6), m.Cover(b"", -1), m.Cover(b"", 0, 0, -1.0)):
        with pytest.raises(RefusedError, match=r"cover"):
            one.call(cover)
    one.call(m.Observed([(float("nan"), 0.0, 1.0), (64.0, -1e9, 1.0)], [(12345, 1.0, -1.0)]))
    assert one.call(m.Plans()).data["engines"][0]["steps"] == 0


def test_a_timing_report_above_the_limit_closes_the_connection(slow, engine):
    one, step, ending = engine(slow.address), (64.0, 0.0, 0.01), (12345, 1.0, 1.0)
    one.call(m.Observed([step] * OBSERVED_MAX, [ending] * OBSERVED_MAX))
    too_many = OBSERVED_MAX + 1
    for endless in (
        ([step] * too_many, []),
        ([], [ending] * too_many),
        ([], [], [(12345, "engine_had_it", 1.0)] * too_many),
    ):
        with pytest.raises(NodeGoneError, match="the connection broke"):
            engine(slow.address).call(m.Observed(*endless))
    with (
        contextlib.closing(Client(slow.address, m.Hello(m.PROTOCOL, "test"), 60)) as looking,
        pytest.raises(RefusedError, match="named no namespace"),  # whose steps would they be?
    ):
        looking.call(m.Observed([step]), m.Done, 60)
    assert one.call(m.Plans()).data["engines"][0]["steps"] == OBSERVED_MAX
    assert f"length <= {OBSERVED_MAX}" in slow.said()


def test_a_plan_that_was_not_carried_out_is_marked_and_not_counted(slow, engine, names):
    keys = names("context", BLOCKS)
    one, looking = engine(slow.address), engine(slow.address)
    one.until(lambda _: one.call(m.Plans()).data["tiers"][1]["reads"])
    one.call(m.Observed(STEPS))
    had, ended, loaded, aborted, newer = (ask(one, keys).plan for _ in range(5))
    one.call(
        m.Observed(
            [],
            [(ended, 0.0, 0.13), (loaded, 0.01, 0.0)],
            [
                (had, "engine_had_it", 0.01),
                (aborted, "request_ended", 0.0),
                (newer, "a reason of a newer engine", 0.5),
                (12345, "engine_had_it", float("nan")),
            ],
        )
    )
    open_plan = ask(one, keys).plan
    one.close()
    one = looking

    def marks():
        answer = one.call(m.Plans()).data
        return {plan["plan"]: plan["not_followed"] for plan in answer["plans"]}

    one.until(lambda _: marks()[open_plan])
    assert marks() == {
        had: "engine_had_it",
        ended: None,
        loaded: None,
        aborted: "request_ended",
        newer: "other",
        open_plan: "engine_gone",
    }
    right = one.call(m.Plans()).data["right"]
    assert (right["ended"], right["not_followed"]) == (1, 4)
