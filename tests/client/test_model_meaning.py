"""The meaning of a model follows from its files and overrides, and from no library's version."""

import json

import pytest

from holdfast.client.model_meaning import ModelSource, model_digest, positions_of

SOURCE = ModelSource(
    weights="digest of files",
    config={
        "hidden_size": 64,
        "rope_theta": 10000.0,
        "text_config": {"rope_scaling": {"factor": 2.0}, "num_hidden_layers": 2},
    },
    overrides={},
    dtype="bfloat16",
    quantised_on_load="none",
    code="none",
    computed_by="any",
)


def test_the_digest_matches_the_golden_vector():
    assert model_digest(SOURCE) == "13f77e2ee5569ddb9cc26f666b63af9b"


def test_positions_have_the_paths_of_inner_sections():
    assert json.loads(positions_of(SOURCE)) == {
        "config": {"rope_theta": 10000.0, "text_config.rope_scaling": {"factor": 2.0}},
        "overrides": {},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "others"},
        {"config": {**SOURCE.config, "hidden_size": 65}},
        {"overrides": {"hidden_size": 65}},
        {"dtype": "float32"},
        {"quantised_on_load": "fp8"},
        {"code": "a1b2"},
        {"computed_by": "vllm"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_has_another_digest(change):
    assert model_digest(SOURCE._replace(**change)) != model_digest(SOURCE)


def test_an_override_of_the_rope_changes_the_positions():
    overridden = SOURCE._replace(overrides={"rope_theta": 5e5})
    assert positions_of(overridden) != positions_of(SOURCE)


@pytest.mark.parametrize("field", ["_name_or_path", "transformers_version", "torch_dtype"])
def test_a_field_that_shapes_no_state_does_not_change_the_digest(field):
    written = SOURCE._replace(config={**SOURCE.config, field: "9.9"})
    assert model_digest(written) == model_digest(SOURCE)
    assert positions_of(written) == positions_of(SOURCE)
