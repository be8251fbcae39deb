"""A public domain is written by its publisher only, or the configuration is refused."""

import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError

HOST = {"kind": "host", "capacity": "64 MiB"}
SHARED = [
    {"kind": "pool", "members": "/etc/members.yaml"},
    {"kind": "valkey", "address": "tcp://10.0.0.1:6379"},
]


def read(tiers, keyring="", **options):
    commons = {"key_file": "/c.key", "public": True, "publish_file": "/p.key", **options}
    domains = {"default": {"key_file": "/d.key"}, "commons": commons}
    data = {"listen": "unix:///run/h/node.sock", "tiers": [HOST, *tiers]}
    return parse({**data, "domains": domains, "keyring": keyring})


@pytest.mark.parametrize("tier", SHARED)
def test_a_public_domain_on_a_shared_tier_requires_a_key_ring(tier):
    with pytest.raises(ConfigError, match=r"^domains\.commons\.public: .*; set keyring to one"):
        read([tier])
    assert read([tier], keyring="/shared/ring.json").domains["commons"].public


@pytest.mark.parametrize("tier", SHARED)
def test_a_public_domain_on_a_shared_tier_must_be_sealed(tier):
    with pytest.raises(ConfigError, match=r"^domains\.commons\.seal: false, .*; leave it out"):
        read([tier], keyring="/shared/ring.json", seal=False)


def test_a_public_domain_on_local_tiers_needs_no_key_ring_and_no_seal(tmp_path):
    disk = {"kind": "disk", "path": str(tmp_path), "capacity": "16 MiB"}
    assert read([], seal=False).domains["commons"].public
    assert read([disk]).domains["commons"].public
