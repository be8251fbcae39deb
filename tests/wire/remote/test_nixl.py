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
def rdma_libraries(install_package):
    """Install the system's RDMA libraries; skip, saying why, where that is not possible."""
    if _loads():
        return
    reason = install_package("ibverbs-providers")
    if not _loads():
        pytest.skip(f"no {RDMA_LIBRARY} here, and it cannot be installed: {reason}")


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_with_an_agent_ends_with_its_own_status_and_whole_output(rdma_libraries, status):
    argv = [sys.executable, "-c", PROGRAM, str(status)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout == "x" * 100_000 + "\nhook\n"
