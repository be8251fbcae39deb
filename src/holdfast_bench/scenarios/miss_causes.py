"""Explain from the node's and the connector's records why a context was not fetched.

The node records each plan (see the message `Plans`); the connector writes to the engine's log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast_bench.harness.node import NodeUnderTest

CONNECTOR = re.compile(
    r"late: the node did not say.*|load given up.*|\d+ of \d+ pages not loaded.*|blocks not saved.*"
)
"""The connector's log lines about a request that did not follow its plan."""

COMPUTED_SOONER = (
    "A small model may compute a context sooner than a slow disk or network delivers it: "
    "--plan held fetches it anyway."
)

_NO_PLAN = "the node made no plan: the connector did not ask it, or it does not hold the context"


class MissWatch:
    """The records that a node and an engine's log gain after this object was made."""

    def __init__(self, node: NodeUnderTest, log: Path) -> None:
        self._node, self._log = node, log
        self._last_plan = node.last_plan()
        self._logged = log.stat().st_size

    def plan(self) -> dict[str, Any] | None:
        """Return the node's last new plan, None if it made none."""
        return self._node.plan_after(self._last_plan)

    def why(self) -> str:
        """Return the recorded cause why the context was not fetched as planned."""
        new_lines = self._log.read_bytes()[self._logged :].decode(errors="replace")
        return why_missed(self.plan(), CONNECTOR.findall(new_lines))


def why_missed(plan: Mapping[str, Any] | None, connector: Sequence[str]) -> str:
    """Return the recorded cause: from the node's plan (None: it made none) and the connector."""
    return "; ".join([_why_by_plan(plan), *(f"the connector: {line}" for line in connector)])


def _why_by_plan(plan: Mapping[str, Any] | None) -> str:
    if plan is None:
        return _NO_PLAN
    planned, landed = int(plan["blocks"]), plan["landed_blocks"]
    told = f"the node's plan: {plan['reason']}"
    if not planned:
        return f"{told}. {COMPUTED_SOONER}"
    if landed is None:
        return f"{told}, and nothing was fetched: no request for the blocks reached the node"
    fetched_s = plan["actual"]["fetched_s"]
    expected_s = plan["expected"]["fetched_s"]
    return (
        f"{told}; {landed} of {planned} blocks came in {fetched_s:.2f} s "
        f"(expected {expected_s:.2f} s, limit {plan['deadline_s']:.2f} s): {plan['outcome']}"
    )
