"""The example fetches in its second run what the first one computed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from holdfast_bench.harness.model import make

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "transformers" / "conversation.py"


def test_the_second_run_of_the_example_fetches_the_document(tmp_path):
    document = tmp_path / "document.txt"
    document.write_text("Beacons tell ships where they are. " * 60)
    argv = [sys.executable, str(EXAMPLE), str(make("tiny")), str(document)]
    shown = []
    for _ in range(2):
        ran = subprocess.run(
            argv, cwd=tmp_path, capture_output=True, text=True, check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        shown.append(ran.stdout.splitlines()[0])
    assert shown[0].startswith("0 tokens fetched, ")
    assert ", 0 computed in " in shown[1]
