"""Questions about a load, and one ladder worked out for it."""

from collections.abc import Callable

import pytest

from holdfast.sim.model import load_model
from holdfast.sim.profile import shipped
from holdfast.sim.size import Demand, Question, Wish
from holdfast.sim.size.need import Need, Rung, need

MEDIA = ("ddr5", "nvme-tlc", "pool-flash")


def question_of(
    demand: Demand,
    model: str = "Llama-3.1-70B",
    *,
    gpu: str = "H200x8",
    wish: Wish | None = None,
    **more: object,
) -> Question:
    """A question about a load, with the shipped profile."""
    profile = shipped()
    kind, number = profile.gpu(gpu)
    question = {"media": MEDIA, "dtype": "bf16", **more}
    return Question(
        shape=load_model(model),
        demand=demand,
        gpu=kind,
        gpus=number,
        profile=profile,
        wish=wish or Wish(),
        **question,
    )


def need_of(question: Question, *rungs: Rung) -> Need | None:
    """What one ladder needs, every request counted."""
    held = {tokens: question.demand.held(tokens) for tokens in (0.0, *(r.tokens for r in rungs))}
    return need(question, rungs, held)


@pytest.fixture(scope="session")
def asked() -> Callable[..., Question]:
    """Ask about a load; see `question_of`."""
    return question_of


@pytest.fixture(scope="session")
def worked_out() -> Callable[..., Need | None]:
    """Work out one ladder; see `need_of`."""
    return need_of
