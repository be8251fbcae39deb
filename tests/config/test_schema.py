"""The JSON Schema of a configuration accepts what the node accepts, and names what it refuses."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from holdfast.byte_size import Size
from holdfast.config import parse, read, schema
from holdfast.errors import ConfigError
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.kind import TierKind, TierSection

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "deploy").rglob("config/*.yaml"))
HOST = {"kind": "host", "capacity": "64 MiB"}
NODE = {"listen": "unix:///run/a.sock", "tiers": [HOST]}


class Toy(TierSection, frozen=True):
    capacity: Size
    slots: int = 4


@pytest.fixture
def validator():
    found = schema.config_schema()
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_shipped_configurations_are_valid(validator, file):
    assert list(validator.iter_errors(yaml.safe_load(file.read_text()))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"liste": "unix:///run/b.sock"},
        {"plan": "fastest"},
        {"lease_s": "long"},
        {"tiers": [{**HOST, "capacity": "64 chunks"}]},
        {"tiers": [{**HOST, "path": "/x"}]},
        {"tiers": [HOST, {"kind": "tape"}]},
        {"tiers": [HOST, {"kind": "disk"}]},
        {"domains": {"a": {"share": "big"}}},
    ],
    ids=str,
)
def test_a_configuration_that_a_node_refuses_is_invalid_in_the_schema(validator, change):
    assert validator.is_valid(NODE)
    assert not validator.is_valid(NODE | change)
    with pytest.raises(ConfigError):
        parse(NODE | change)


def test_the_schema_includes_tier_kinds_of_installed_packages(monkeypatch):
    kind = TierKind(Toy, lambda *_: MemoryTier(1))
    for module in (schema, read):
        monkeypatch.setattr(module, "find_kind", {"toy": kind}.get)
    monkeypatch.setattr(schema, "installed_kinds", lambda: ["toy"])
    check = Draft202012Validator(schema.config_schema()).is_valid
    assert check(NODE | {"tiers": [HOST, {"kind": "toy", "capacity": "1 GiB"}]})
    assert not check(NODE | {"tiers": [HOST, {"kind": "toy"}]})
    assert not check(NODE | {"tiers": [HOST, {"kind": "toy", "capacity": 1, "slots": "few"}]})


def test_doctor_prints_the_schema_with_a_description_of_each_key(holdfast):
    done = holdfast("doctor", "--schema")
    assert done.returncode == 0, done.stderr
    keys = json.loads(done.stdout)["properties"]
    assert keys["plan"]["enum"] == ["best", "held"]
    assert "fetch" in keys["plan"]["description"]
