"""Fixtures that start Redis or Valkey servers."""

import itertools

import pytest

from holdfast.tiers.valkey.kind import ValkeyOptions
from holdfast.tiers.valkey.tier import ValkeyTier
from holdfast_bench.peers.valkey_server import ValkeyServers

NUMBERS = itertools.count()


@pytest.fixture(scope="class")
def class_servers(_valkey, tmp_path_factory):
    """Return a function that starts servers for all tests of a class."""
    started = []

    def start(nodes):
        started.append(ValkeyServers(tmp_path_factory.mktemp("servers"), nodes))
        started[-1].start()
        return started[-1]

    yield start
    for servers in started:
        servers.close()


@pytest.fixture
def serve(_valkey, tmp_path):
    """Return a function that starts servers for one test."""
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
    """Return a function that opens tiers for one test."""
    tiers = []

    def make(servers, **options):
        options.setdefault("cluster", len(servers.endpoints) > 1)
        options.setdefault("deadline_s", 60.0)
        options.setdefault("ask_s", 60.0)
        tiers.append(ValkeyTier(ValkeyOptions(address=list(servers.addresses), **options)))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()
