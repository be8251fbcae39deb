"""Fixtures that skip a test if the store it needs cannot be installed here."""

import pytest

from holdfast_bench.peers import mooncake_server, valkey_server


@pytest.fixture(scope="session")
def _valkey(find_program):
    """Skip with the reason if no Redis or Valkey server is installed or can be installed."""
    if not valkey_server.program():
        find_program("redis-server", "redis-server")


@pytest.fixture(scope="session")
def _mooncake(install_package):
    """Skip with the reason if Mooncake is not installed, or its libraries cannot be installed."""
    if not mooncake_server.why_not():
        return
    reason = install_package("libibverbs1") if mooncake_server.installed() else ""
    if why_not := mooncake_server.why_not():
        pytest.skip(f"{why_not} {reason}".strip())
