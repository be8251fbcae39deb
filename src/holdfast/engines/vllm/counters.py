"""The connector's counters, in vLLM's log and in vLLM's `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from holdfast.client.counts import ClientCounts

COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "prompts": ((), "Prompts that were computed or loaded, each once."),
    "prompt_tokens": ((), "Tokens of these prompts; of aborted ones those that have KV."),
    "prompt_tokens_by_source": (
        ("source",),
        "Prompt tokens by where the KV came from: engine (vLLM's own cache), computed, or a tier.",
    ),
    "calls": (
        ("operation", "outcome"),
        "Calls of the node: lookup of the scheduler, fetch and save of each worker.",
    ),
    "fetched_tokens": ((), "Tokens whose KV was fetched and verified, on each worker."),
    "fetched_bytes": ((), "Bytes that were fetched and verified."),
    "fetch_seconds": ((), "Time of the fetches that returned blocks, summed."),
    "copied_bytes": (
        ("path",),
        "Bytes between GPU and arena: locked memory, or bounced through the driver's buffers.",
    ),
    "lock_seconds": ((), "Time in the GPU's driver for page-locking and unlocking."),
    "device_failures": ((), "Workers whose GPU has failed: all later requests are computed."),
    "saved_blocks": ((), "Blocks that were saved."),
    "lost_blocks": ((), "Deferred blocks whose pages vLLM has used before they were saved."),
    "durable_blocks": (
        ("outcome",),
        "Blocks of durable requests: kept (on the durable tier, flushed), or late.",
    ),
    "declined_requests": (("reason",), "Requests that do not load from Holdfast."),
    "prestaged_requests": ((), "Announcements of waiting requests, whose context is prestaged."),
    "awaited_loads": ((), "Waits for another request's load of the same blocks."),
    "bad_hints": ((), "Requests with invalid hints."),
}
"""Every counter: its labels and its meaning. In `/metrics` its name begins `vllm:holdfast_`."""


@dataclass
class ConnectorCounts(ClientCounts, KVConnectorStats):
    """The counts of the engine's client, which vLLM aggregates over processes.

    Names and labels are those of `COUNTERS`.
    """

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorCounts:
        both = ConnectorCounts(dict(self.data))
        both.add_all(other.data)
        return both

    def reduce(self) -> dict[str, Any]:
        """Return what vLLM logs, in the words of `holdfast stats`."""
        counts = dict(self.data)
        tokens = counts.pop("prompt_tokens", 0)

        def percent(part: float) -> str:
            return f"{100 * part / tokens:.0f} %"

        summary: dict[str, Any] = {}
        if tokens:
            summary = {"prompts": int(counts.pop("prompts", 0)), "prompt tokens": int(tokens)}
            source_keys = [key for key in counts if key.startswith("prompt_tokens_by_source/")]
            by_source = {key.partition("/")[2]: counts.pop(key) for key in source_keys}
            engine, computed = by_source.pop("engine", 0), by_source.pop("computed", 0)
            by_tier = ", ".join(f"{tier} {percent(part)}" for tier, part in by_source.items())
            from_tiers = percent(sum(by_source.values())) + (f" ({by_tier})" if by_tier else "")
            summary["from Holdfast"] = from_tiers
            summary["from vLLM's own cache"] = percent(engine)
            summary["computed"] = percent(computed)
        seconds, nbytes = counts.pop("fetch_seconds", 0), counts.pop("fetched_bytes", 0)
        if seconds:
            summary["fetch"] = f"{nbytes / seconds / 1e9:.2f} GB/s"
        summary |= {key.replace("_", " "): int(counts[key]) for key in sorted(counts)}
        return summary

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The counters in vLLM's `/metrics`; made in the process that serves it."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: counter(
                name=f"vllm:holdfast_{name}",
                documentation=meaning,
                labelnames=[*labelnames, *labels],
            )
            for name, (labels, meaning) in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, number in transfer_stats_data.items():
            name = key.partition("/")[0]
            labels = key.split("/", len(COUNTERS[name][0]))[1:]
            self._counters[name].labels(*engine, *labels).inc(number)
