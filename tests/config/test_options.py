"""Where a node listens, and what it shows and asks for there."""

import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError

HERE = "unix:///run/h/node.sock"


def data(**more):
    return {"tiers": [{"kind": "host", "capacity": "64 MiB"}], **more}


def test_a_node_listens_for_engines_and_for_other_nodes(tmp_path):
    given = data(
        listen=["tcp://0.0.0.0:7441", "unix:///run/h/node.sock", "tcp://[::1]:7442"],
        tls={"cert": "tls/node.crt", "key": "tls/node.key", "ca": "/etc/ca.pem"},
        tokens={"file": "token"},
    )
    config = parse(given, tmp_path)
    assert config.node_address == "unix:///run/h/node.sock"
    assert config.target_addresses == ["tcp://0.0.0.0:7441", "tcp://[::1]:7442"]
    assert config.tls.key == f"{tmp_path}/tls/node.key"
    assert (config.tls.ca, config.tokens.file) == ("/etc/ca.pem", f"{tmp_path}/token")
    assert config.tokens.key_file == ""


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:7441", "tcp://localhost:1", "tcp://[::1]:0"])
def test_a_target_on_loopback_needs_no_credentials(listen):
    config = parse(data(listen=listen))
    assert (config.node_address, config.target_addresses) == ("", [listen])


def test_a_target_with_a_token_key_may_listen_on_an_exposed_address(tmp_path):
    config = parse(data(listen="tcp://10.0.0.7:7441", tokens={"key_file": "key"}), tmp_path)
    assert config.tokens.key_file == f"{tmp_path}/key"


def test_a_scrub_rate_too_low_for_its_period_is_refused():
    assert parse(data(listen=HERE)).scrub.every_s == 7 * 86_400
    assert parse(data(listen=HERE, scrub={"every_s": 0})).scrub.every_s == 0
    with pytest.raises(
        ConfigError, match=r"scrub.rate: 1000 B a second reads 58.59 KiB in 60 s, t"
    ):
        parse(data(listen=HERE, scrub={"every_s": 60, "rate": 1000}))
    with pytest.raises(
        ConfigError, match=r": -1 s is not from 0 to 31,536,000 s .* 0 turns it off"
    ):
        parse(data(listen=HERE, scrub={"every_s": -1}))


def test_the_segment_length_is_an_option_with_bounds():
    assert parse(data(listen=HERE)).segment_blocks == 512
    assert parse(data(listen=HERE, segment_blocks=64)).segment_blocks == 64
    for wrong in (0, -1, 65_537):
        with pytest.raises(ConfigError, match=rf"segment_blocks: {wrong} is not 1 to 65536"):
            parse(data(listen=HERE, segment_blocks=wrong))


def test_connections_of_other_nodes_have_a_range():
    assert parse(data(listen=HERE)).target_connections == 1_024
    assert parse(data(listen=HERE, target_connections=4_096)).target_connections == 4_096
    for wrong in (0, 15, 16_385):
        words = rf"^target_connections: {wrong} is not 16 to 16384; allow six for each host"
        with pytest.raises(ConfigError, match=words):
            parse(data(listen=HERE, target_connections=wrong))


HOST = {"kind": "host", "capacity": "64 MiB"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"capacity": 1 << 51}, r"tiers\.1\.capacity: .* is more than 1024 TiB; lower it"),
        ({"path": ""}, r"tiers\.1\.path: is empty; name a folder"),
        ({"path": "a\0b"}, r"cannot name a file; correct it"),
        ({"path": "a\ud800"}, r"cannot name a file; correct it"),
        ({"writes_per_day": "\udc80"}, r"is not UTF-8 text; correct it"),
    ],
)
def test_invalid_disk_options_are_refused_before_the_disk_is_opened(changed, words) -> None:
    disk = {"kind": "disk", "path": "/data", "capacity": "1 GiB", **changed}
    with pytest.raises(ConfigError, match=words):
        parse({"listen": HERE, "tiers": [HOST, disk]})


@pytest.mark.parametrize("huge", [10**330, 1 << 60, f"{10**29} TiB", "2e9 TiB", f"{'9' * 30} B"])
def test_an_impossibly_large_size_is_refused_by_its_key(huge):
    tiers = [{"kind": "host", "capacity": huge}]
    with pytest.raises(ConfigError, match=r"^tiers\.0\.capacity: ") as refused:
        parse({"tiers": tiers})
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("domains", "words"),
    [
        ({"a": {"seal": "maybe"}}, r"domains\.a\.seal: 'maybe': Expected 'bool \| null'"),
        ({"ok": {}, "b": {"share": "much"}}, r"domains\.b\.share: 'much': Expected 'float"),
        ({"ok": {"share": 2}, "b": 5}, r"domains\.b: 5: Expected 'object', got 'int'; correct it"),
        (
            {"ok": {"quota_bytes": {"host": 1}}, "b": {"quota_bytes": {"host": 1, "disk": "x"}}},
            r"domains\.b\.quota_bytes\.disk: 'x': not a size; write bytes",
        ),
        ({"b": {"key_command": ["cat", 1]}}, r"domains\.b\.key_command\.1: 1: Expected 'str'"),
        ({1: {"key_file": "k"}}, r"domains: 1 is not text, as a name must be; put it in quotes"),
        ({"b": {"quota_bytes": {2: 1}}}, r"domains\.b\.quota_bytes: 2 is not text, as a name"),
    ],
)
def test_an_error_in_a_domain_names_the_domain_and_the_value(domains, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        parse(data(listen=HERE, domains=domains))
