"""Redis or Valkey servers, run by the tests themselves."""

import itertools
import subprocess

import pytest

from holdfast.rig.valkey_server import ValkeyServers, program
from holdfast.tiers.valkey.tier import ValkeyOptions, ValkeyTier

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def _installed():
    """Skip, saying why, where there is no server and none can be installed."""
    if program():
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", "redis-server"]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=240, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no redis-server here, and it can not be installed: {error}")
    if not program():
        why = (done.stderr.strip() or "apt-get says nothing").splitlines()[-1]
        pytest.skip(f"no redis-server here, and `{' '.join(install)}` fails: {why}")


@pytest.fixture(scope="class")
def lasting_servers(_installed, tmp_path_factory):
    """Start servers that end with the last test of a class."""
    started = []

    def start(nodes):
        started.append(ValkeyServers(tmp_path_factory.mktemp("servers"), nodes))
        started[-1].start()
        return started[-1]

    yield start
    for servers in started:
        servers.close()


@pytest.fixture
def serve(_installed, tmp_path):
    """Start servers that end with the test."""
    started = []

    def start(nodes=1, flags=(), login=None, tls=None):
        servers = ValkeyServers(tmp_path / f"servers-{next(NUMBERS)}", nodes, flags, tls)
        if login is not None:
            servers.login = login
        started.append(servers)
        servers.start()
        return servers

    yield start
    for servers in started:
        servers.close()


@pytest.fixture
def opened():
    """Open tiers that are closed with the test."""
    tiers = []

    def make(servers, **options):
        options.setdefault("cluster", len(servers.endpoints) > 1)
        tiers.append(ValkeyTier(ValkeyOptions(addresses=servers.addresses, **options)))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()
