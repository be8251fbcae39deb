"""The draft model of speculative decoding: its layers, its groups and what names its blocks."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from described_engine import (
    HEAD_SIZE,
    HEADS,
    PAGES,
    SETTING,
    TOKENS,
    Configuration,
    config_of,
    spec_of,
)

from holdfast.blocks.fingerprint import KvGroup
from holdfast.engines.vllm.describe import fingerprint_of
from holdfast.engines.vllm.draft import draft_of
from holdfast.engines.vllm.kv_groups import geometry_of, paged_groups
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.worker_rank import WorkerRank

LAYERS = 2
TARGET = tuple(f"model.layers.{number}.self_attn.attn" for number in range(LAYERS))


def drafting(method="eagle", hidden_size=64, lookahead=1, **changes):
    """The configuration of an engine of two layers that drafts with this method."""
    config = config_of(num_prefill_lookahead_tokens=lookahead)
    config.model_config.get_total_num_hidden_layers = lambda: LAYERS
    hf = Configuration(rope_theta=1e4, hidden_size=hidden_size, num_hidden_layers=1)
    model = SimpleNamespace(
        **vars(config.model_config) | {"hf_config": hf, "hf_text_config": hf, "model": "/models/d"}
    )
    fields = {"method": method, "draft_model_config": model}
    config.speculative_config = SimpleNamespace(**fields | changes)
    return config


def groups_of(config, *layers, spec=None):
    """Return the KV groups of these layers and the target's, and the tensors of all."""
    page = (PAGES, HEADS, TOKENS, 2 * HEAD_SIZE)
    tensors = {name: torch.zeros(page, dtype=torch.bfloat16) for name in (*TARGET, *layers)}
    group = SimpleNamespace(layer_names=list(tensors), kv_cache_spec=spec or spec_of())
    return paged_groups(config, SimpleNamespace(kv_cache_groups=[group]), tensors), tensors


def digests_of(config, *layers):
    """Return the fingerprint of each group."""
    groups, tensors = groups_of(config, *layers)
    return [
        fingerprint_of(
            config, group, geometry_of(group, tensors, PAGES), SETTING, WorkerRank()
        ).digest()
        for group in groups
    ]


EAGLE = "model.layers.2.self_attn.attn"


@pytest.mark.parametrize(
    ("method", "layer", "lookahead"),
    [
        ("eagle", EAGLE, 1),
        ("eagle3", EAGLE, 1),
        ("mtp", "model.layers.2.mtp_block.self_attn.attn", 1),
        ("mtp", "model.layers.0.mtp_block.self_attn.attn", 1),  # as vLLM names MiMo's
        ("mtp", "mtp.layers.0.self_attn.attn", 2),
        ("draft_model", "draft_model.model.layers.0.self_attn.attn", 0),
    ],
)
def test_layers_of_a_draft_are_a_group_of_their_own(method, layer, lookahead):
    (target, draft), _ = groups_of(drafting(method, lookahead=lookahead), layer)
    assert (target.layers, draft.layers) == (TARGET, (layer,))
    assert (target.kv_group, draft.kv_group) == (KvGroup.all_layers(2), KvGroup.all_layers(1))
    assert target.tables == draft.tables == (0,)
    assert (target.lookahead, draft.lookahead) == (0, lookahead)


def test_blocks_of_the_target_do_not_depend_on_its_draft():
    (alone,) = digests_of(config_of())
    for changes in ({}, {"hidden_size": 32}, {"method": "eagle3"}):
        target, _ = digests_of(drafting(**changes), EAGLE)
        assert target == alone


def test_a_draft_has_the_same_blocks_from_another_folder():
    found = []
    for folder in ("/models/one", "/models/two"):
        config = drafting()
        # As vLLM wraps the configuration of an EAGLE head.
        config.speculative_config.draft_model_config.hf_config.model = {"_name_or_path": folder}
        found.append(digests_of(config, EAGLE))
    assert found[0] == found[1]


def test_two_drafts_share_no_block():
    other_target = drafting()
    other_target.model_config.dtype = torch.float16
    several = [
        drafting(),
        drafting("eagle3"),
        drafting(hidden_size=32),
        drafting(lookahead=2),
        drafting(kv_cache_dtype="fp8_e5m2"),
        other_target,
    ]
    found = {digests_of(each, EAGLE)[1] for each in several}
    assert len(found) == len(several)
    assert found.isdisjoint({digests_of(each, EAGLE)[0] for each in several})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (drafting("dflash"), "'dflash'.*supported are draft_model, eagle"),
        (drafting("custom_class"), "'custom_class'"),
        (drafting(parallel_drafting=True), "parallel_drafting of.*'eagle'"),
        (drafting("draft_model", use_heterogeneous_vocab=True), "use_heterogeneous_vocab"),
    ],
)
def test_a_method_whose_kv_is_not_named_is_refused(config, named):
    with pytest.raises(UnsupportedError, match=named):
        groups_of(config, EAGLE)


def test_a_draft_behind_pipeline_stages_is_refused():
    config = drafting()
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size is 2"):
        draft_of(config)


def test_a_draft_whose_layers_are_not_found_is_refused():
    with pytest.raises(UnsupportedError, match=r"no layer with KV is known.*'eagle'"):
        groups_of(drafting())


@pytest.mark.parametrize("method", ["ngram", "suffix", "medusa", "mlp_speculator"])
def test_a_method_without_kv_of_its_own_has_no_draft(method):
    config = config_of(speculative_config=SimpleNamespace(method=method))
    assert draft_of(config) is None
    assert digests_of(config) == digests_of(config_of())
