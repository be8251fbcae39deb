"""The environment of SGLang: what is said if it is not there."""

from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.peers import sglang_environment


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))


def test_without_it_the_error_names_the_command_that_installs_it():
    assert not sglang_environment.installed()
    with pytest.raises(HoldfastError, match="make sglang"):
        sglang_environment.python()


def test_its_processes_find_both_packages_and_what_replaces_cuda(tmp_path):
    shims, packages = sglang_environment.variables(tmp_path)["PYTHONPATH"].split(":")
    assert (tmp_path / "packages" / "holdfast" / "engines" / "sglang").is_dir()
    assert packages == str(tmp_path / "packages")
    assert shims.endswith("sglang_on_cpu")


def test_the_replacements_know_the_variable_for_attention_of_new_tokens_only(tmp_path):
    shims = sglang_environment.variables(tmp_path)["PYTHONPATH"].split(":")[0]
    [name] = sglang_environment.NEW_TOKENS_ONLY
    assert f'"{name}"' in (Path(shims) / "sitecustomize.py").read_text()
