"""How much of each tier and what bandwidth: proposed from a model, a load, a wish and prices."""

from holdfast.sim.size.demand import Cut, Demand, of_trace, of_users
from holdfast.sim.size.question import Question, Wish
from holdfast.sim.size.search import Answer, answer

__all__ = ["Answer", "Cut", "Demand", "Question", "Wish", "answer", "of_trace", "of_users"]
