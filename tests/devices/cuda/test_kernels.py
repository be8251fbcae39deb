"""The kernels for pages, without a GPU: under Triton's interpreter, and compiled for two GPUs.

Triton is in a folder of its own, because vLLM behaves in another way if it can import it. Each file
runs in a process of its own, because a wrong address in the interpreter ends the process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TRITON = Path(os.environ.get("HOLDFAST_TRITON", ROOT / ".venv" / "triton"))


@pytest.mark.parametrize("what", ["interpreted", "compiled"])
def test_kernels(what, tmp_path):
    if not (TRITON / "triton").is_dir():
        pytest.skip(f"no Triton in {TRITON}: make setup installs it, HOLDFAST_TRITON names another")
    pytest.importorskip("torch")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(TRITON)]),
        "TRITON_INTERPRET": str(int(what == "interpreted")),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*argv, str(HERE / f"{what}_kernels.py")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
