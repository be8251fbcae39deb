"""Phase 6: correctness: a real model's cache, the tests on a GPU, engines that share a node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.report import Row, not_measured
from holdfast_bench.harness.process import TAIL_LINES
from holdfast_bench.measure.gpu import shared_node
from holdfast_bench.measure.gpu.gpu_tests import TESTS_FOLDER, tests_on_gpu
from holdfast_bench.measure.gpu.model_cache import same_generation
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import TOY_DECODER, DecoderShape

MODEL = DecoderShape("llama-small", 8, 1024, 16, 4, 64, 2816, 32_000)
BLOCKS, TOY_BLOCKS = 16, 2
_PASSED = re.compile(r"(\d+) passed")


def rows(setting: Setting) -> Iterator[Row]:
    """Yield how many tokens were generated as without Holdfast, and how many tests passed."""
    name = "gpu.transformers.same_tokens"
    if find_spec("transformers") is None:
        yield not_measured(name, "transformers is not installed")
    else:
        shape, blocks = (TOY_DECODER, TOY_BLOCKS) if setting.rehearse else (MODEL, BLOCKS)
        same = same_generation(setting.gpu, shape, blocks)
        yield Row(name, same, "tokens", {"blocks": blocks, "gpu": setting.gpu.name()})
    yield tests_row(setting, TESTS_FOLDER)
    yield from shared_node.rows(setting)


def tests_row(setting: Setting, folder: Path) -> Row:
    """Return the row of the tests that need a GPU; a rehearsal only collects them.

    They run without the project's configuration, which needs more packages than they do.
    """
    name = "gpu.tests.passed"
    files = list(map(str, tests_on_gpu(folder)))
    if not files or find_spec("pytest") is None:
        return not_measured(name, "there are no tests here, or no pytest")
    plain = ("--noconftest", "-c", os.devnull, "--import-mode=importlib", "-p", "no:cacheprovider")
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *plain, *files]
    if setting.rehearse:
        argv.append("--collect-only")
    ended = subprocess.run(
        argv, capture_output=True, text=True, timeout=max(1.0, setting.left_s()), check=False
    )
    passed = _PASSED.search(ended.stdout)
    if ended.returncode or (passed is None and not setting.rehearse):
        lines = (ended.stdout + ended.stderr).splitlines()[-TAIL_LINES:]
        raise HoldfastError("the tests on a GPU failed: " + "\n".join(lines))
    return Row(name, float(passed[1]) if passed else 0.0, "tests")
