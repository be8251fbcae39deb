"""Options of the adapter: errors name value, limit and remedy."""

import pytest

from holdfast.engines.lmcache.options import read_adapter_options
from holdfast.errors import ConfigError

GOOD = {"holdfast": "unix:///run/holdfast/node.sock", "identity": "v1"}


def test_defaults():
    options = read_adapter_options(GOOD)
    assert (options.domain, options.chunk_tokens, options.load_deadline_s) == ("default", 256, 5.0)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "holdfast is not set; start a node"),
        ({"holdfast": "unix:///x"}, "identity is not set: LMCache's keys name a model by its name"),
        (GOOD | {"size": 1}, "size is unknown; known are holdfast, identity"),
        (GOOD | {"domain": ""}, "domain is empty"),
        (GOOD | {"chunk_tokens": 0}, "chunk_tokens is 0"),
        (
            GOOD | {"load_deadline_s": 61},
            "is 61; it must be above 0 and at most 60",
        ),
        (GOOD | {"identity": 1}, "identity"),
        (GOOD | {"holdfast": "10.0.0.1:7000"}, "holdfast"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(params, said):
    with pytest.raises(ConfigError, match=said):
        read_adapter_options(params)
