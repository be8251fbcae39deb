"""The bindings against recorded interfaces of engines and versions that are not installed here."""

import importlib
import json
from abc import abstractmethod
from inspect import Parameter, Signature
from pathlib import Path

import pytest
from record_interface import hooks_of

from holdfast.engines.interface import differences

LEFT_TO_VLLM = {
    "KVConnectorBase_V1": {
        # steps: whole blocks are copied beside the forward pass, and reported at its end
        *("clear_connector_metadata", "has_connector_metadata", "finish_forward"),
        *("get_finished", "get_finished_count", "handle_preemptions", "has_pending_block_frees"),
        # pages: copied where vLLM puts them, at addresses that a sleep does not change
        *("restore_kv_caches", "get_mem_pool_context", "set_host_xfer_buffer_ops"),
        *("get_required_kvcache_layout", "bind_kv_cache_manager"),
        # graphs: no code of the binding runs inside one
        *("reset_capture_state", "requires_piecewise_for_cudagraph"),
        # hybrid models: a resume has the pages of all groups, at the end of a block
        *("supports_divergent_local_hybrid_hits", "get_loaded_kv_cache_group_ids"),
        "register_finished_partial_tail",
        # events: a node has its own
        *("get_kv_connector_kv_cache_events", "take_events"),
    },
    "SupportsHMA": set(),
    "ECConnectorBase": {
        *("bind_connector_metadata", "clear_connector_metadata", "register_caches", "role"),
        *("get_finished", "build_connector_worker_meta", "update_connector_output"),
        *("start_save_caches", "start_worker_services", "take_unavailable_requests"),
        *("update_state_after_free", "request_finished", "has_pending_push_work"),
        *("get_ec_connector_stats", "build_ec_connector_stats", "build_prom_metrics"),
    },
    "SecondaryTierManager": {
        *("block_size_bytes", "bp_detector", "has_pending_work", "take_events", "touch"),
        *("serve_external_requests", "build_metric_definitions", "get_stats"),
        *("config_info_keys", "config_info"),
    },
}
"""Methods of vLLM's classes of which the bindings keep vLLM's own."""

RECORDS = sorted(Path(__file__).with_name("recorded").glob("*.json"))
VLLM_RECORDS = [file for file in RECORDS if file.stem.startswith("vllm-")]
CASES = [
    pytest.param(table, found, id=f"{file.stem}-{table.rpartition('.')[2]}")
    for file in RECORDS
    for table, found in json.loads(file.read_text())["tables"].items()
]


def method_of(parameters, is_abstract):
    def method(self): ...

    named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *parameters)]
    method.__signature__ = Signature(named)
    return abstractmethod(method) if is_abstract else method


def class_of(path, recorded):
    """Return a class that has what was recorded of an engine's."""
    body = dict.fromkeys(recorded["names"])
    for name in recorded["abstract"]:
        body[name] = method_of((), is_abstract=True)
    for name, parameters in recorded["methods"].items():
        body[name] = method_of(parameters, name in recorded["abstract"])
    body["__annotations__"] = dict.fromkeys(recorded["fields"] or recorded["names"], object)
    made = type(path.rpartition(".")[2], (), body)
    made.__abstractmethods__ = frozenset(recorded["abstract"])
    return made


def expected_of(table):
    module, _, name = table.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("table", "found"), CASES)
def test_a_binding_matches_the_recorded_interface(table, found):
    interface = expected_of(table)
    assert found.keys() == interface.keys(), "record the interface again"
    for path, expected in interface.items():
        assert differences(class_of(path, found[path]), expected) == []


def test_every_engine_has_a_record():
    recorded = {json.loads(file.read_text())["engine"] for file in RECORDS}
    assert recorded == {"vLLM", "SGLang", "LMCache"}


def bases_of(tables):
    """Yield the tables and paths of vLLM's classes that a binding derives from."""
    for table in tables:
        for path, expected in expected_of(table).items():
            if path.rpartition(".")[2] in LEFT_TO_VLLM:
                yield table, path, {*expected.methods, *expected.newer, *expected.attributes}


def test_each_method_of_the_newest_vllm_is_compared_or_left_to_vllm():
    """A method that a version adds fails here until it is known what a binding does about it."""
    found = json.loads(max(VLLM_RECORDS).read_text())["tables"]
    left = {
        path.rpartition(".")[2]: set(found[table][path]["hooks"]) - compared
        for table, path, compared in bases_of(found)
    }
    assert left == LEFT_TO_VLLM


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch, as vLLM imports it
def test_each_method_of_the_installed_vllm_is_compared_or_left_to_vllm():
    pytest.importorskip("vllm")
    for _, path, compared in bases_of(json.loads(max(VLLM_RECORDS).read_text())["tables"]):
        module, _, name = path.rpartition(".")
        hooks = set(hooks_of(getattr(importlib.import_module(module), name)))
        assert hooks - compared <= LEFT_TO_VLLM[name]
