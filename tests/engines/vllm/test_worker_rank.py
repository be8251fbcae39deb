"""Which ranks of an engine hold equal pages, and so save them once."""

from types import SimpleNamespace

import pytest

from holdfast.engines.vllm.worker_rank import WorkerRank, copies_of, replicas_id

LATENT = SimpleNamespace(max_tp_shards=1)
TWO_HEADS = SimpleNamespace(max_tp_shards=2)
UNKNOWN = SimpleNamespace(max_tp_shards=None)
STATE = SimpleNamespace(tp_replicated=True)


@pytest.mark.parametrize(
    ("spec", "size", "copies"),
    [
        (LATENT, 1, 1),
        (LATENT, 4, 4),
        (TWO_HEADS, 4, 2),
        (TWO_HEADS, 2, 1),
        (SimpleNamespace(max_tp_shards=3), 4, 1),
        (UNKNOWN, 4, 1),
        (STATE, 4, 4),
        (SimpleNamespace(), 4, 1),
    ],
)
def test_copies_are_counted_only_if_vllm_says_that_pages_are_equal(spec, size, copies):
    assert copies_of(spec, size) == copies


@pytest.mark.parametrize(("spec", "writers"), [(LATENT, 1), (TWO_HEADS, 2), (UNKNOWN, 4)])
def test_of_ranks_with_equal_pages_one_saves_and_all_have_its_name(spec, writers):
    ranks = [WorkerRank(number, 4) for number in range(4)]
    savers = [rank.slice_of(spec) for rank in ranks if rank.saves(spec)]
    assert len(savers) == writers
    assert {rank.slice_of(spec).tp_rank for rank in ranks} == {each.tp_rank for each in savers}


def test_pipeline_stages_and_sizes_of_engines_have_blocks_of_their_own():
    slices = [
        WorkerRank(tp, 2, pp, stages).slice_of(LATENT)
        for stages in (1, 2)
        for pp in range(stages)
        for tp in range(2)
    ]
    assert len({(each.pp_rank, each.pp_size) for each in slices}) == 3
    assert WorkerRank(0, 1).slice_of(LATENT) != WorkerRank(0, 2).slice_of(LATENT)


def test_workers_are_numbered_stage_by_stage():
    ranks = [WorkerRank(tp, 2, pp, 3) for pp in range(3) for tp in range(2)]
    assert [rank.number for rank in ranks] == list(range(6))


@pytest.mark.parametrize(
    ("own", "number", "common"),
    [("one_dp0", 0, "one"), ("one_dp1", 1, "one"), ("one", 0, "one"), ("a_dp1_dp12", 12, "a_dp1")],
)
def test_replicas_of_an_engine_have_one_id_in_common(own, number, common):
    parallel = SimpleNamespace(data_parallel_index=number)
    assert replicas_id(own, SimpleNamespace(parallel_config=parallel)) == common
