"""Questions about a load, and one ladder worked out for it."""

from collections.abc import Callable

import pytest

from holdfast.sim.model.catalogue import load_model
from holdfast.sim.profile import shipped
from holdfast.sim.size.demand import Demand
from holdfast.sim.size.need import CandidateTier, LadderNeed, need
from holdfast.sim.size.question import SizingGoal, SizingQuestion

MEDIA = ("ddr5", "nvme-tlc", "pool-flash")


def question_of(
    demand: Demand,
    model: str = "Llama-3.1-70B",
    *,
    gpu: str = "H200x8",
    goal: SizingGoal | None = None,
    **more: object,
) -> SizingQuestion:
    """A question about a load, with the shipped profile."""
    profile = shipped()
    kind, number = profile.gpu(gpu)
    question = {"media": MEDIA, "dtype": "bf16", **more}
    return SizingQuestion(
        shape=load_model(model),
        demand=demand,
        gpu=kind,
        gpus=number,
        profile=profile,
        goal=goal or SizingGoal(),
        **question,
    )


def need_of(question: SizingQuestion, *candidate: CandidateTier) -> LadderNeed | None:
    """What one ladder needs, every request counted."""
    held = {
        tokens: question.demand.held(tokens) for tokens in (0.0, *(r.tokens for r in candidate))
    }
    return need(question, question.goal, candidate, held)


@pytest.fixture(scope="session")
def asked() -> Callable[..., SizingQuestion]:
    """Ask about a load; see `question_of`."""
    return question_of


@pytest.fixture(scope="session")
def worked_out() -> Callable[..., LadderNeed | None]:
    """Work out one ladder; see `need_of`."""
    return need_of
