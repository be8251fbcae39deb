"""The options in SGLang's extra config: what is accepted, and what each error names."""

import pytest

from holdfast.engines.sglang.options import OF_SGLANG, read_options
from holdfast.errors import ConfigError

NODE = "unix:///run/holdfast/node.sock"


def test_defaults():
    options = read_options({"holdfast": NODE})
    assert options.holdfast == NODE
    assert options.domain == "default"
    assert not options.images


def test_keys_that_sglang_reads_are_left_to_it():
    assert read_options({"holdfast": NODE, **dict.fromkeys(OF_SGLANG, 1)}).holdfast == NODE


def test_a_node_may_be_named_by_its_file(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text(f"listen: {NODE}\ntiers:\n  - {{kind: host, capacity: 64 MiB}}\n")
    assert read_options({"holdfast": str(file)}).holdfast == NODE


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "holdfast is not set"),
        ({"holdfast": ""}, "holdfast is not set"),
        ({"holdfast": NODE, "tenant": "a"}, "'tenant' is unknown; Holdfast's are holdfast, domain"),
        ({"holdfast": NODE, "domain": ""}, "domain is empty"),
        ({"holdfast": NODE, "domain": 7}, "domain"),
        ({"holdfast": NODE, "get_deadline_s": 0}, "get_deadline_s is 0; it must be above 0"),
        ({"holdfast": NODE, "get_deadline_s": 61}, "at most 60 seconds"),
        ({"holdfast": "10.0.0.1:7070"}, "or name the node's YAML file"),
        ({"holdfast": "tcp://10.0.0.1:7070"}, "or name the node's YAML file"),
    ],
)
def test_an_error_names_the_value_and_a_remedy(extra, named):
    with pytest.raises(ConfigError, match=named):
        read_options(extra)
