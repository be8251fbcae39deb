"""Quotas that cannot be: refused by key, value, limit and remedy."""

import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError
from holdfast.limits import GIB, MIB

TIERS = [
    {"kind": "host", "capacity": "1 GiB"},
    {"kind": "disk", "path": "/d", "capacity": "2 GiB"},
    {"kind": "pool", "members": "/m.yaml"},
    {"kind": "disk", "path": "/e", "capacity": "2 GiB"},
]


def config(acme, tiers=None, **others):
    domains = {"default": {}, "acme": acme, **others}
    keyed = {name: {"key_file": f"/{name}.key", **more} for name, more in domains.items()}
    return parse({"listen": "/run/n.sock", "tiers": tiers or TIERS, "domains": keyed})


def test_valid_quotas_and_reservations_are_read():
    found = config(
        {
            "quota_bytes": {"host": "512 MiB", "disk": "1 GiB", "disk2": 4096},
            "reserved_bytes": {"host": "256 MiB"},
            "write_budget_bytes_per_day": "1 TiB",
            "share": 2,
        }
    )
    assert found.tier_names == ["host", "disk", "pool1", "disk2"]
    acme = found.domains["acme"]
    assert acme.quota_bytes == {"host": 512 * MIB, "disk": GIB, "disk2": 4096}
    assert acme.divides
    assert not found.domains["default"].divides


@pytest.mark.parametrize(
    ("acme", "words"),
    [
        (
            {"quota_bytes": {"flash": "1 GiB"}},
            r"domains\.acme\.quota_bytes\.flash: there is no tier 'flash'; name one of host, disk",
        ),
        ({"quota_bytes": {"pool1": "1 GiB"}}, r"quota_bytes\.pool1: .* set quotas on the nodes"),
        (
            {"quota_bytes": {"host": "1 MiB"}},
            r"quota_bytes\.host: 1 MiB is less than 64 MiB, the least that one block takes; raise",
        ),
        ({"quota_bytes": {"disk": 100}}, r"quota_bytes\.disk: 100 B is less than 4 KiB"),
        (
            {"reserved_bytes": {"disk": "1 GiB"}},
            r"reserved_bytes\.disk: only memory can be",
        ),
        (
            {"quota_bytes": {"host": "64 MiB"}, "reserved_bytes": {"host": "65 MiB"}},
            r"reserved_bytes\.host: 65 MiB is more than the quota of 64 MiB; lower it, or raise",
        ),
        (
            {"reserved_bytes": {"host": "2 GiB"}},
            r"reserved_bytes\.host: 2 GiB makes 2 GiB for all domains, the host tier has 1 GiB",
        ),
        ({"share": 0}, r"domains\.acme\.share: 0 is not above 0 and at most 1000"),
        ({"share": -1.5}, r"domains\.acme\.share: -1\.5 is not"),
        ({"write_budget_bytes_per_day": 5}, r"write_budget_bytes_per_day: 5 B is less than 4 KiB"),
    ],
)
def test_invalid_quotas_and_reservations_are_refused(acme, words):
    with pytest.raises(ConfigError, match=words):
        config(acme)


def test_reservations_that_together_exceed_memory_are_refused():
    with pytest.raises(ConfigError, match=r"domains\.beta\.reserved_bytes\.host: 700 MiB makes"):
        config(
            {"reserved_bytes": {"host": "700 MiB"}}, beta={"reserved_bytes": {"host": "700 MiB"}}
        )


def test_a_write_budget_needs_a_disk():
    with pytest.raises(ConfigError, match="there is no disk tier to write to"):
        config({"write_budget_bytes_per_day": "1 GiB"}, tiers=TIERS[:1])
