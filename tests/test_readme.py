"""What the README shows works as written."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli import VERBS

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture
def example():
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return code


def test_the_example_runs_and_gets_its_blocks_back(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = {}
    exec(compile(example, "README.md", "exec"), seen)
    assert (seen["landed"].tokens, seen["landed"].blocks) == (896, 7)
    assert seen["landed"].sources == {"host": 7}
    assert (seen["found"] == seen["blocks"]).all()


def test_the_disk_tier_of_the_example_outlives_its_process(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = {}
    exec(compile(example, "README.md", "exec"), seen)
    with holdfast.open(host="64 MiB", disk="256 MiB", path="holdfast-cache") as store:
        store.recovery.wait(10.0)
        found = np.zeros_like(seen["blocks"])
        landed = store.session(seen["model"]).fetch(seen["tokens"], into=found)
    assert landed.sources == {"disk": 7}
    assert (found == seen["blocks"]).all()


def test_the_vllm_flag_is_json_and_names_our_connector():
    [flag] = re.findall(r"--kv-transfer-config '(.*?)'", README.read_text(), re.DOTALL)
    fields = json.loads(flag)
    assert fields["kv_connector_module_path"] == "holdfast.engines.vllm"
    assert fields["kv_load_failure_policy"] == "recompute"
    assert set(fields["kv_connector_extra_config"]) == {"holdfast"}


def test_every_verb_is_listed():
    for verb in VERBS:
        assert f"`holdfast {verb}" in README.read_text()


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
