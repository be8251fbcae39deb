"""The connector's counters since vLLM last collected them; vLLM aggregates and logs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass
class ConnectorCounts(KVConnectorStats):
    """Counts by name, such as `loaded_blocks` or `late_loads`.

    `load_ms` and `load_bytes` give a bandwidth; all others are plain counts.
    """

    data: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, number: float = 1) -> None:
        """Count `number` more of `name`."""
        if number:
            self.data[name] = self.data.get(name, 0) + number

    def take(self) -> ConnectorCounts | None:
        """Return and reset the counts; None if there are none."""
        if not self.data:
            return None
        taken = ConnectorCounts(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorCounts:
        both = ConnectorCounts(dict(self.data))
        for name, number in other.data.items():
            both.add(name, number)
        return both

    def reduce(self) -> dict[str, int | float]:
        summary: dict[str, Any] = dict(sorted(self.data.items()))
        if summary.get("load_ms"):
            gigabytes_per_s = summary.pop("load_bytes", 0) / summary["load_ms"] / 1e6
            summary["load_GB/s"] = round(gigabytes_per_s, 2)
            summary["load_ms"] = round(summary["load_ms"], 1)
        return summary

    def is_empty(self) -> bool:
        return not self.data
