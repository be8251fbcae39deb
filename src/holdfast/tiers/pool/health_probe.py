"""Probes members that are half open or back from an ejection, so that no user's request has to."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.membership.poller import Poller
from holdfast.tiers.pool.connections import TargetConnections
from holdfast.tiers.pool.health import PoolHealth
from holdfast.tiers.pool.lookup import SegmentLookup

PROBE_INTERVAL_S = 0.25
"""Interval between two rounds of probes, in seconds."""

IDLE_S = 1.0
"""A member to which no call has ended for this long, in seconds, is probed, so that a dead member
is noticed without traffic."""

NO_NAMESPACE = Namespace(bytes(KEY_BYTES), bytes(KEY_BYTES), 1, 1)


class HealthProbes(Poller):
    """A thread that sends probes to members that are half open, back from an ejection, or idle.

    `keep` is called before each round, to update the known members.
    """

    def __init__(
        self,
        lookup: SegmentLookup,
        health: PoolHealth,
        connections: TargetConnections,
        ask_s: float,
        keep: Callable[[], None],
    ) -> None:
        super().__init__("probes of pool members", PROBE_INTERVAL_S, PROBE_INTERVAL_S)
        self._lookup = lookup
        self._health = health
        self._connections = connections
        self._ask_s = ask_s
        self._keep = keep

    def _one_round(self) -> None:
        """Probe each member that is due until it is up or gives no answer; then probe idle ones."""
        self._keep()
        due = set(self._health.due_for_probe())
        for member in self._lookup.members() if due else ():
            while member.id in due and not self.closing.is_set():
                answer = self._connections.call(member, lambda t, _: t.probe(self._ask_s))
                if answer is not Outcome.OK:
                    break
                due = set(self._health.due_for_probe())
        idle = set(self._health.idle(IDLE_S))
        for member in self._lookup.members() if idle else ():
            if member.id in idle and not self.closing.is_set():
                self._connections.call(member, lambda t, _: t.exist(NO_NAMESPACE, [], self._ask_s))
