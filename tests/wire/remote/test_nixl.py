"""A process that made a NIXL agent ends with its own status, whatever RDMA libraries are there."""

import ctypes
import subprocess
import sys

import pytest

from holdfast.wire.remote import nixl

pytestmark = pytest.mark.skipif(not nixl.installed(), reason="NIXL is not installed")

RDMA_LIBRARY = "libefa.so.1"
"""What UCX's EFA module loads: it brings a second copy of libnl-route into the process."""

PROGRAM = """
import atexit, sys
from holdfast.wire.remote.nixl import NixlAgent

atexit.register(print, "hook")
agent = NixlAgent("test")
print("x" * 100_000)
sys.exit(int(sys.argv[1]))
"""


def _loads():
    try:
        ctypes.CDLL(RDMA_LIBRARY)
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def rdma_libraries():
    """Install the system's RDMA libraries; skip, saying why, where that is not possible."""
    if _loads():
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", "ibverbs-providers"]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=240, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no {RDMA_LIBRARY} here, and it cannot be installed: {error}")
    if not _loads():
        why = (done.stderr.strip() or "apt-get says nothing").splitlines()[-1]
        pytest.skip(f"no {RDMA_LIBRARY} here, and `{' '.join(install)}` fails: {why}")


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_with_an_agent_ends_with_its_own_status_and_whole_output(rdma_libraries, status):
    argv = [sys.executable, "-c", PROGRAM, str(status)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout == "x" * 100_000 + "\nhook\n"
