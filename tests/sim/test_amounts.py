"""Amounts as people read them."""

from holdfast.sim.amounts import duration_text, figure_text, size_text


def test_sizes_are_written_with_three_digits():
    assert [size_text(n) for n in (3.2e14, 6.55e11, 2.5e7, 4.6e18)] == [
        "320 TB",
        "655 GB",
        "25 MB",
        "4,600 PB",
    ]


def test_sizes_are_rounded_before_their_unit_is_chosen():
    assert [size_text(n) for n in (9.994e11, 9.996e11, 9.996e8, 9.999e17)] == [
        "999 GB",
        "1 TB",
        "1 GB",
        "1,000 PB",
    ]


def test_large_figures_have_no_exponent():
    assert [figure_text(n) for n in (1.0, 1.206, 999.4, 999.6, 1234.0, 2e6)] == [
        "1",
        "1.21",
        "999",
        "1,000",
        "1,234",
        "2,000,000",
    ]


def test_durations_are_written_in_hours_days_months_or_years():
    hours = (0.2, 1.4, 1.6, 47.9, 48.0, 24 * 89, 24 * 100, 24 * 729, 24 * 365 * 2.5)
    assert [duration_text(each) for each in hours] == [
        "1 hour",
        "1 hour",
        "2 hours",
        "48 hours",
        "2 days",
        "89 days",
        "3 months",
        "24 months",
        "2.5 years",
    ]
