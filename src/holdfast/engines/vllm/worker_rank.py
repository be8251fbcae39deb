"""The place of a worker in its engine: its tensor-parallel and pipeline rank, and who has its KV.

Ranks of a tensor-parallel group hold different heads, or equal copies: the latent of MLA, a state
that is not divided, heads that are fewer than ranks. Of ranks with copies, the first one saves, and
all read what it saved. Each pipeline stage holds the layers of its own. Exact blocks of one stage
are never those of another, and a prompt is held if every stage holds it; of portable blocks a stage
fills its layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from holdfast.blocks.layout import RankSlice

T = TypeVar("T")


class WorkerRank(NamedTuple):
    """A worker's tensor-parallel rank and pipeline rank, and the number of each kind."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def number(self) -> int:
        """The worker's number: stage by stage, and in a stage by tensor-parallel rank."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def slice_of(self, spec: Any) -> RankSlice:
        """Return the part of the model that this worker's pages of a group hold.

        It names the first of the ranks that hold equal copies.
        """
        first = self.tp_rank - self.tp_rank % copies_of(spec, self.tp_size)
        return RankSlice(first, self.tp_size, self.pp_rank, self.pp_size)

    def saves(self, spec: Any) -> bool:
        """Whether this worker saves the pages of a group: of ranks with equal copies, the first."""
        return self.tp_rank % copies_of(spec, self.tp_size) == 0


def rank_of(vllm_config: Any) -> WorkerRank:
    """Return the rank of this process; only a worker has one."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    pp_size = getattr(parallel, "pipeline_parallel_size", 1)
    return WorkerRank(
        tp_rank=get_tensor_model_parallel_rank(),
        tp_size=parallel.tensor_parallel_size,
        pp_rank=get_pp_group().rank_in_group if pp_size > 1 else 0,
        pp_size=pp_size,
    )


def replicas_id(engine_id: str, vllm_config: Any) -> str:
    """Return the id that the data-parallel replicas of an engine on one host have in common.

    vLLM adds the number of a replica to the id that its connector gets.
    """
    number = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    return engine_id.removesuffix(f"_dp{number}")


def gather_stages(rank: WorkerRank, own: T) -> list[T]:
    """Return what each pipeline stage has passed, in their order; all stages must call it.

    vLLM pickles it: these are processes of one engine.
    """
    if rank.pp_size == 1:
        return [own]
    import torch.distributed
    from vllm.distributed.parallel_state import get_pp_group

    found: list[Any] = [None] * rank.pp_size
    torch.distributed.all_gather_object(found, own, group=get_pp_group().cpu_group)
    return found


def copies_of(spec: Any, tp_size: int) -> int:
    """Return how many consecutive tensor-parallel ranks hold equal pages of a group.

    1 if vLLM's specification does not say that they are equal.
    """
    if getattr(spec, "tp_replicated", False):
        return tp_size
    shards = getattr(spec, "max_tp_shards", None)
    if not shards or shards >= tp_size or tp_size % shards:
        return 1
    return tp_size // int(shards)
