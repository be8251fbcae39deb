"""Fixtures that skip a test if the store it needs cannot be installed here."""

import subprocess

import pytest

from holdfast_bench.peers import mooncake_server, valkey_server


def install(package):
    """Install a Debian package; return the reason if that fails, else an empty text."""
    command = ["apt-get", "install", "-y", "--no-install-recommends", package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    message = (done.stderr.strip() or "no error message").splitlines()[-1]
    return f"`{' '.join(command)}` fails: {message}"


@pytest.fixture(scope="session")
def _valkey():
    """Skip with the reason if no Redis or Valkey server is installed or can be installed."""
    if valkey_server.program():
        return
    reason = install("redis-server")
    if not valkey_server.program():
        pytest.skip(f"no redis-server here, and it cannot be installed: {reason}")


@pytest.fixture(scope="session")
def _mooncake():
    """Skip with the reason if Mooncake is not installed, or its libraries cannot be installed."""
    if not mooncake_server.why_not():
        return
    reason = install("libibverbs1") if mooncake_server.installed() else ""
    if why_not := mooncake_server.why_not():
        pytest.skip(f"{why_not} {reason}".strip())
