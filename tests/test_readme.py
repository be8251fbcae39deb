"""What the README shows works as written."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import holdfast
from holdfast.cli import all_verbs

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture
def example(tmp_path):
    """Run the example in a process and folder of its own; return what its variables were."""
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    keep = "np.savez('seen', found=found, blocks=blocks); print(json.dumps(landed._asdict()))"
    (tmp_path / "example.py").write_text(f"{code}\nimport json\n{keep}\n")
    ran = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    arrays = np.load(tmp_path / "seen.npz")
    return SimpleNamespace(
        landed=json.loads(ran.stdout), found=arrays["found"], blocks=arrays["blocks"]
    )


def test_the_example_runs_and_gets_its_blocks_back(example):
    assert (example.landed["tokens"], example.landed["blocks"]) == (896, 7)
    assert example.landed["sources"] == {"host": 7}
    assert (example.found == example.blocks).all()


def test_the_disk_tier_of_the_example_outlives_its_process(example, tmp_path):
    layout = holdfast.Layout.portable(
        layers=2, kv_heads=2, head_size=64, dtype="float16", block_tokens=128
    )
    model = holdfast.Fingerprint.portable(
        layout,
        model="digest of config and weights",
        positions="rope 10000",
        adapter="none",
        kv_quantisation="none",
        kv_scales="none",
    )
    with holdfast.open(
        host="64 MiB", disk="256 MiB", path=str(tmp_path / "holdfast-cache")
    ) as store:
        assert store.recovery.wait(60.0)
        found = np.zeros_like(example.blocks)
        landed = store.session(model).fetch(list(range(1000)), into=found)
    assert landed.sources == {"disk": 7}
    assert (found == example.blocks).all()


def test_the_vllm_flag_is_json_and_names_our_connector():
    [flag] = re.findall(r"--kv-transfer-config '(.*?)'", README.read_text(), re.DOTALL)
    fields = json.loads(flag)
    assert fields["kv_connector_module_path"] == "holdfast.engines.vllm"
    assert fields["kv_load_failure_policy"] == "recompute"
    assert set(fields["kv_connector_extra_config"]) == {"holdfast"}


def test_every_verb_is_listed():
    for verb in all_verbs():
        assert f"`holdfast {verb}" in README.read_text()


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
