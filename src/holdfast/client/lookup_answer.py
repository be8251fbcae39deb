"""The answer to an engine's lookup, as a message: the same embedded and from a node."""

from __future__ import annotations

from holdfast.store.lookup import PlannedFetch
from holdfast.wire.local.messages import Covered


def lookup_answer(planned: PlannedFetch, pending: int = 0) -> Covered:
    """Return what a store tells an engine about a context that it looked up.

    `pending`: leading blocks that are held or are being saved, if that is known.
    """
    plan = planned.plan
    return Covered(
        blocks=planned.held,
        worth=plan.blocks,
        sources=planned.sources,
        plan=planned.number,
        deadline_s=plan.deadline_s,
        expected_s=plan.expected_s,
        recompute_s=plan.recompute_s,
        reason=plan.reason,
        unanswered={tier: str(outcome) for tier, outcome in planned.unanswered.items()},
        pending=max(pending, planned.held),
    )
