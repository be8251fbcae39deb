"""A real model continues with a cache from Holdfast as with its own, bit for bit."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from holdfast.devices.host import HostDevice  # noqa: E402
from holdfast.errors import HoldfastError  # noqa: E402
from holdfast_bench.measure.gpu import correctness, model_cache  # noqa: E402
from holdfast_bench.measure.gpu.accelerator import HostAccelerator  # noqa: E402
from holdfast_bench.measure.gpu.shapes import TOY_DECODER  # noqa: E402


def test_a_model_of_transformers_generates_the_same_with_a_fetched_cache():
    pytest.importorskip("transformers")
    gpu = HostAccelerator()
    assert model_cache.same_generation(gpu, TOY_DECODER, 2) == model_cache.NEW_TOKENS


def test_a_byte_that_differs_gives_other_logits(monkeypatch):
    pytest.importorskip("transformers")

    class Forgetful(HostDevice):
        def scatter(self, arena, moves, *given):
            return super().scatter(arena, moves[:-1], *given)

    monkeypatch.setattr(HostAccelerator, "device", lambda _, *given: Forgetful(*given))
    with pytest.raises(HoldfastError, match="other logits"):
        model_cache.same_generation(HostAccelerator(), TOY_DECODER, 2)


@pytest.fixture
def without_transformers(monkeypatch):
    found = correctness.find_spec
    monkeypatch.setattr(
        correctness, "find_spec", lambda name: None if name == "transformers" else found(name)
    )


def test_what_cannot_be_tested_is_named(measured, without_transformers, monkeypatch, tmp_path):
    monkeypatch.setattr(correctness, "TESTS_FOLDER", tmp_path / "none")
    monkeypatch.setattr(correctness.shared_node, "rows", lambda _: [])
    whys = {what: row.more["why"] for what, row in measured(correctness).items()}
    assert whys == {
        "gpu.transformers.same_tokens": "transformers is not installed",
        "gpu.tests.passed": "there are no tests here, or no pytest",
    }


@pytest.mark.parametrize(("status", "failed"), [(0, False), (1, True)])
def test_tests_that_fail_on_the_gpu_are_an_error(setting, monkeypatch, tmp_path, status, failed):
    ran = []

    def run(argv, **_):
        ran.append(argv)
        return subprocess.CompletedProcess(argv, status, "12 passed in 3 s\n", "")

    monkeypatch.setattr(correctness.subprocess, "run", run)
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "test_on_gpu.py").touch()
    on_gpu = setting._replace(rehearse=False)
    if failed:
        with pytest.raises(HoldfastError, match="the tests on a GPU failed: 12 passed"):
            correctness.tests_row(on_gpu, tmp_path)
    else:
        assert correctness.tests_row(on_gpu, tmp_path).value == 12
    assert ran[0][:3] == [sys.executable, "-m", "pytest"]
    assert "--collect-only" not in ran[0]
