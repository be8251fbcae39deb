"""Pages on GPUs: vLLM's own code writes them, under Triton's interpreter, in a process of its own.

vLLM takes another code if it can import Triton, so the other tests must not find it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm.gpu_pages import gpu_format
from holdfast.engines.vllm.unsupported import UnsupportedError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TRITON = Path(os.environ.get("HOLDFAST_TRITON", ROOT / ".venv" / "triton"))


def test_the_code_of_vllm_writes_pages_of_the_known_format(tmp_path):
    if not (TRITON / "triton").is_dir():
        pytest.skip(f"no Triton in {TRITON}: make setup installs it, HOLDFAST_TRITON names another")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(TRITON)]),
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*argv, str(HERE / "interpreted_gpu_pages.py")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "order", ["1x4.16.128:321", "2x4.8.128:123", "1x8.16.128:123", "1x4.16.64:213", "1x1.16.128:32"]
)
def test_another_order_of_a_page_is_refused(order):
    heads = 1 if order.startswith("1x1.") else 4
    with pytest.raises(UnsupportedError, match="have the order"):
        gpu_format(order, heads, 16, 64, 2)
