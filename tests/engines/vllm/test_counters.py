"""The connector's counters: they add up, and each has a metric in vLLM."""

import functools
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from holdfast.engines.vllm import HoldfastConnector
from holdfast.engines.vllm.counters import COUNTERS, ConnectorCounts


def test_counts_add_up_and_are_handed_over_once():
    counts = ConnectorCounts()
    assert counts.take() is None
    counts.add("prompts")
    counts.add("prompt_tokens", number=1_000)
    for source, tokens in {"engine": 100, "computed": 300, "host": 500, "disk": 100}.items():
        counts.add("prompt_tokens_by_source", source, number=tokens)
    counts.add("fetch_seconds", number=0.002)
    counts.add("fetched_bytes", number=4_000_000)
    counts.add("calls", "fetch", "ok")
    counts.add("calls", "fetch", "late", number=0)
    taken = counts.take()
    assert counts.is_empty()
    both = taken.aggregate(HoldfastConnector.build_kv_connector_stats(taken.to_dict()))
    assert both.reduce() == {
        "prompts": 2,
        "prompt tokens": 2_000,
        "from Holdfast": "60 % (host 50 %, disk 10 %)",
        "from vLLM's own cache": "10 %",
        "computed": "30 %",
        "fetch": "2.00 GB/s",
        "calls/fetch/ok": 2,
    }
    assert taken.data["calls/fetch/ok"] == 1


def test_every_counter_has_its_metric_in_vllm():
    registry = CollectorRegistry()
    kinds = Counter, Gauge, Histogram
    types = {kind: functools.partial(kind, registry=registry) for kind in kinds}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = HoldfastConnector.build_prom_metrics(
        config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    counts = ConnectorCounts()
    for name, (labels, _) in COUNTERS.items():
        counts.add(name, *labels, number=2)
    counts.add("prompt_tokens_by_source", "vendor/tier", number=5)
    metrics.observe(counts.to_dict(), 1)
    of_tier = {"model_name": "m", "engine": "1", "source": "vendor/tier"}
    by_source = "vllm:holdfast_prompt_tokens_by_source_total"
    assert registry.get_sample_value(by_source, of_tier) == 5
    for name, (labels, _) in COUNTERS.items():
        named = {"model_name": "m", "engine": "1", **dict(zip(labels, labels, strict=True))}
        assert registry.get_sample_value(f"vllm:holdfast_{name}_total", named) == 2
