"""The table of cached models says of transformers what the tests of small models show."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from random_models import model_of, prompt_of  # noqa: E402

import holdfast  # noqa: E402
from holdfast.cli.model_caching import examine_model, kind_of_shape  # noqa: E402
from holdfast.engines import cached_models  # noqa: E402
from holdfast.sim.model.catalogue import load_model  # noqa: E402

KINDS = {
    "llama": cached_models.FULL,
    "mla": cached_models.FULL,
    "gemma3": cached_models.WINDOWS,
    "llama4": cached_models.CHUNKS,
    "mistral": cached_models.WINDOW_ONLY,
    "gemma4": cached_models.SIZES,
    "qwen3_next": cached_models.RECURRENT,
    "lfm2": cached_models.RECURRENT,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_that_the_table_calls_cached_is_fetched(name, store, tmp_path):
    model, ids = model_of(name), prompt_of(3, 100)
    model.config.save_pretrained(tmp_path)
    kind = kind_of_shape(load_model(str(tmp_path)))
    assert kind is KINDS[name]
    assert not kind.not_in_transformers
    assert "holdfast.transformers caches it" in examine_model(str(tmp_path)).why
    found = [holdfast.transformers.cache(model, ids, store, block_tokens=32) for _ in range(2)]
    assert [each.prefix.fetched for each in found] == [0, 96]


def test_every_kind_that_the_table_calls_cached_has_a_test():
    cached = {kind for kind in cached_models.MODEL_KINDS if not kind.not_in_transformers}
    assert cached == set(KINDS.values())
