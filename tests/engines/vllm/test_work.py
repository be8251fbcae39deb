import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm.work import WorkerReport


def test_the_fewest_blocks_of_any_rank_count_for_a_load():
    ranks = [{"r": {"disk": 2, "host": 1}, "only": {}}, {"r": {"host": 2}}]
    one, other = (WorkerReport(landed=landed) for landed in ranks)
    assert one.aggregate(other).landed == {"r": {"host": 2}, "only": {}}
