"""What the verbs have in common: numbers of things in words."""

import pytest

from holdfast.cli.options import many


@pytest.mark.parametrize(
    ("count", "what", "words"),
    [
        (1, "pass", "1 pass"),
        (0, "pass", "0 passes"),
        (2, "block", "2 blocks"),
        (1, "stored copy", "1 stored copy"),
        (3, "stored copy", "3 stored copies"),
        (2, "data key", "2 data keys"),
    ],
)
def test_one_is_said_as_one(count, what, words):
    assert many(count, what) == words
