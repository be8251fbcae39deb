"""The bindings against recorded interfaces of engines and versions that are not installed here."""

import importlib
import json
from abc import abstractmethod
from inspect import Parameter, Signature
from pathlib import Path

import pytest

from holdfast.engines.interface import differences

RECORDS = sorted(Path(__file__).with_name("recorded").glob("*.json"))
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


@pytest.mark.parametrize(("table", "found"), CASES)
def test_a_binding_matches_the_recorded_interface(table, found):
    module, _, name = table.partition(":")
    interface = getattr(importlib.import_module(module), name)
    assert found.keys() == interface.keys(), "record the interface again"
    for path, expected in interface.items():
        assert differences(class_of(path, found[path]), expected) == []


def test_every_engine_has_a_record():
    recorded = {json.loads(file.read_text())["engine"] for file in RECORDS}
    assert recorded == {"vLLM", "SGLang", "LMCache"}
