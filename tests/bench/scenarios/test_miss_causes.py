"""The verdict on a context that was computed names what node and connector recorded."""

from pathlib import Path

import pytest

import holdfast
from holdfast_bench.scenarios.miss_causes import COMPUTED_SOONER, CONNECTOR, why_missed

LATE = "late: the node did not say within 1 s what is held; computed"


def plan(blocks=32, landed=None, outcome="", took_s=None, reason="fetch 32 of 32 blocks from host"):
    return {
        "reason": reason,
        "blocks": blocks,
        "landed_blocks": landed,
        "outcome": outcome,
        "deadline_s": 3.5,
        "expected": {"fetched_s": 0.25},
        "actual": {"fetched_s": took_s},
    }


@pytest.mark.parametrize(
    ("recorded", "said", "words"),
    [
        (None, [], "the node made no plan"),
        (plan(), [LATE], f"no request for the blocks reached the node; the connector: {LATE}"),
        (
            plan(landed=12, outcome="late", took_s=3.5),
            [],
            "12 of 32 blocks came in 3.50 s (expected 0.25 s, limit 3.50 s): late",
        ),
        (plan(landed=0, outcome="corrupt", took_s=0.1), [], "0 of 32 blocks came in 0.10 s"),
        (plan(blocks=0, reason="recompute 0.1 s"), [], f"recompute 0.1 s. {COMPUTED_SOONER}"),
    ],
)
def test_the_recorded_cause_is_named(recorded, said, words):
    assert words in why_missed(recorded, said)


def test_only_a_plan_to_compute_is_explained_by_the_model():
    for recorded in (None, plan(), plan(landed=3, outcome="late", took_s=1.0)):
        assert "small model" not in why_missed(recorded, [LATE])


@pytest.mark.parametrize(
    "words",
    ["late: the node did not say", "load given up", "pages not loaded", "blocks not saved"],
)
def test_the_connector_logs_the_words_that_are_looked_for(words):
    package = Path(holdfast.__file__).parent
    folders = package / "engines" / "vllm", package / "client"
    assert any(words in file.read_text() for folder in folders for file in folder.glob("*.py"))
    assert words in CONNECTOR.pattern


def test_the_connectors_lines_are_found_in_an_engines_log():
    log = f"(EngineCore pid=7) INFO 11-23 [scheduler.py:311] {LATE}\nINFO other\n"
    log += "INFO [loader.py:9] 4 of 32 pages not loaded (late): they are computed\n"
    assert CONNECTOR.findall(log) == [LATE, "4 of 32 pages not loaded (late): they are computed"]
