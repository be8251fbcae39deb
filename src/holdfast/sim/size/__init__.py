"""Sizing: the tiers, capacities and bandwidths that a model, a load and a TTFT goal need."""

from holdfast.sim.size.demand import Cut, Demand, of_trace, of_users
from holdfast.sim.size.question import SizingGoal, SizingQuestion
from holdfast.sim.size.search import SizingAnswer, answer

__all__ = [
    "Cut",
    "Demand",
    "SizingAnswer",
    "SizingGoal",
    "SizingQuestion",
    "answer",
    "of_trace",
    "of_users",
]
