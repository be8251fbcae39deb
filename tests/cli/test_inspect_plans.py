"""`holdfast inspect plans` in words."""

from holdfast.cli.inspect_plans import plans_text


def test_nothing_is_claimed_of_plans_that_ended_without_an_expectation():
    right = {"ended": 0, "within_25_percent": 0, "median_error": None, "late": 0}
    text = plans_text({"tiers": [], "engines": [], "right": right, "plans": []})
    assert text.splitlines()[0] == "  no plan with an expectation has ended yet"
