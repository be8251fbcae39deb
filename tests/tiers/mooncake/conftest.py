"""A Mooncake Store, run by the tests themselves."""

import subprocess

import pytest

from holdfast.rig.mooncake_server import installed, why_not

LIBRARIES = ["libibverbs1"]


@pytest.fixture(scope="session")
def _mooncake():
    """Skip, saying why, where Mooncake is not installed or its libraries can not be."""
    if not (why := why_not()):
        return
    if not installed():
        pytest.skip(why)
    install = ["apt-get", "install", "-y", "--no-install-recommends", *LIBRARIES]
    try:
        subprocess.run(install, capture_output=True, timeout=240, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Mooncake does not load, and `{' '.join(install)}` fails: {error}")
    if why := why_not():
        pytest.skip(why)
