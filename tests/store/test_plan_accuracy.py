"""How plans came out is told of those whose end was expected, late ones included."""

from holdfast.store.plan_accuracy import right


def record(expected_s, actual_s, outcome="ok", not_followed=None):
    return {
        "expected": {"first_token_s": expected_s},
        "actual": {"first_token_s": actual_s},
        "outcome": outcome,
        "not_followed": not_followed,
    }


def test_late_plans_are_counted_among_those_that_ended_with_an_expectation():
    running, unexpected = record(0.1, None), record(0.0, 0.4, "late")
    assert right([running, unexpected]) == {
        "ended": 0,
        "within_25_percent": 0,
        "median_error": None,
        "late": 0,
        "not_followed": 0,
    }
    found = right([running, unexpected, record(0.1, 0.11), record(0.1, 0.2, "late")])
    assert (found["ended"], found["within_25_percent"], found["late"]) == (2, 1, 1)


def test_plans_that_were_not_carried_out_are_counted_by_themselves():
    followed = [record(0.1, 0.11), record(0.1, 0.2, "late")]
    others = [
        record(8.68, 0.3, "", "engine_had_it"),
        record(0.1, None, "", "request_ended"),
        record(0.1, 0.1, "late", "preempted"),
    ]
    assert right(followed + others) == right(followed) | {"not_followed": 3}
