"""A Mooncake Store, run by the tests themselves."""

import subprocess
import sys

import pytest

from holdfast.rig.mooncake_server import installed

LIBRARIES = ["libibverbs1"]


def _import_error():
    script = [sys.executable, "-c", "import mooncake.store"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


@pytest.fixture(scope="session")
def _mooncake():
    """Skip, saying why, where Mooncake is not installed or its libraries can not be."""
    if not installed():
        pytest.skip("Mooncake is not installed: pip install 'holdfast[mooncake]'")
    if not _import_error():
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *LIBRARIES]
    try:
        subprocess.run(install, capture_output=True, timeout=240, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Mooncake does not load, and `{' '.join(install)}` fails: {error}")
    if why := _import_error():
        pytest.skip(f"Mooncake does not load: {why}")
