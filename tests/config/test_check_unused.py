"""An option that has no effect beside the others is refused, if a user would rely on it."""

import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError

HOST = {"kind": "host", "capacity": "64 MiB"}
DISK = {"kind": "disk", "path": "/data/blocks", "capacity": "1 GiB"}
POOL = {"kind": "pool", "members": "/etc/members.yaml"}
KEY = {"default": {"key_file": "/d.key"}}
TCP = "tcp://127.0.0.1:7441"


def read(*lower, listen="unix:///run/h/node.sock", **more):
    return parse({"listen": listen, "tiers": [HOST, *lower], **more})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"durable_days": 3}, r"durable_days: 3 has no effect, because no tier keeps durable cont"),
        ({"keyring": "/r"}, r"keyring: '/r' has no effect, because no domain has a configured key"),
        ({"scrub": {"every_s": 0, "rate": "1 MiB"}}, r"scrub\.rate: 1 MiB a second has no effect"),
        ({"traces": {"share": 0.5}}, r"traces\.share: 0\.5 has no effect, because no requests are"),
        ({"tokens": {"file": "/t"}}, r"tokens\.file: '/t' has no effect, because this node has no"),
        (
            {"transport": "nixl"},
            r"transport: 'nixl' has no effect, because this node has no connections",
        ),
        (
            {"open": True},
            r"open: true has no effect, because this node has no connections to other",
        ),
        (
            {"domains": {"a": {"key_file": "/k", "key_timeout_s": 3}}},
            r"domains\.a\.key_timeout_s: 3 has no effect without key_command; remove it",
        ),
    ],
)
def test_an_option_without_an_effect_is_refused(given, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        read(**given)


@pytest.mark.parametrize(
    "setting", [{"tokens": {"file": "/t"}}, {"transport": "nixl"}, {"open": True}]
)
def test_options_for_connections_are_for_targets_and_for_hosts_of_a_pool(setting):
    read(listen=TCP, **setting)
    read(POOL, domains=KEY, **setting)
    with pytest.raises(ConfigError, match="add a pool tier, listen on tcp://HOST:PORT, or remove"):
        read(DISK, **setting)


def test_durable_days_need_a_tier_that_can_keep_durable_contexts():
    assert read(DISK, durable_days=3).durable_days == 3
    with pytest.raises(ConfigError, match=r"durable_days: .*; add a tier of kind disk, files or o"):
        read(POOL, domains=KEY, durable_days=3)


def test_a_key_ring_may_stay_configured_while_its_domains_are_not_sealed():
    plain = {"default": {"key_file": "/d.key", "seal": False}}
    assert read(DISK, domains=plain, keyring="/r").keyring == "/r"


def test_one_disk_folder_under_two_names_is_refused(tmp_path):
    (tmp_path / "blocks").mkdir()
    (tmp_path / "link").symlink_to("blocks")
    for other in ("link", "blocks/../blocks", "blocks/"):
        tiers = [
            {**DISK, "path": str(tmp_path / "blocks")},
            {**DISK, "path": f"{tmp_path}/{other}"},
        ]
        with pytest.raises(
            ConfigError, match=r"^tiers\.2\.path: .* is also the folder of tiers\.1"
        ):
            read(*tiers)
    read({**DISK, "path": str(tmp_path / "a")}, {**DISK, "path": str(tmp_path / "a" / "b")})
