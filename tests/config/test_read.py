"""A configuration is read from its file, the environment and flags; errors name what is wrong."""

import copy
from typing import Literal

import pytest

from holdfast.config import load, parse, read
from holdfast.errors import ConfigError
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.kind import TierKind, TierSection

TIERS = [{"kind": "host", "capacity": "64 MiB"}]


class Modes(TierSection, frozen=True):
    mode: Literal["a", "b"] = "a"
    admit: Literal["few", "all"] = "few"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "z"}, r"tiers\.1\.mode: 'z': .*; use one of: a, b$"),
        ({"admit": "always"}, r"tiers\.1\.admit: 'always': .*; use one of: few, all$"),
        ({"x": 1}, r"tiers\.1: .* 'x'; remove it; known here: kind, mode, admit$"),
    ],
)
def test_an_error_in_an_installed_tier_kind_names_the_kinds_own_options(monkeypatch, options, said):
    mine = TierKind(Modes, lambda *_: MemoryTier(1))
    monkeypatch.setattr(read, "find_kind", {"mine": mine}.get)
    with pytest.raises(ConfigError, match=f"^{said}"):
        parse({"listen": "/run/a.sock", "tiers": [*TIERS, {"kind": "mine", **options}]})


def test_a_flag_changes_one_of_two_sections_that_share_an_alias(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text(
        "listen: /run/a.sock\ntiers: [{kind: host, capacity: 64 MiB}]\n"
        "domains: {a: &own {key_file: k, share: 2, users: [root]}, b: *own}\n"
    )
    config = load(str(file), {"domains.a.share": "7", "domains.b.users.1": "0"}, {})
    assert (config.domains["a"].share, config.domains["b"].share) == (7, 2)
    assert (config.domains["a"].users, config.domains["b"].users) == (["root"], ["root", "0"])


EVERYTHING = {
    "listen": ["unix:///run/h/node.sock", "tcp://127.0.0.1:7441"],
    "tiers": [
        *TIERS,
        {"kind": "disk", "path": "/d", "capacity": "1 GiB", "writes_per_day": 1.0},
        {"kind": "pool", "members": "members.yaml", "deadline_s": 1.0},
        {
            "kind": "valkey",
            "address": "tcp://127.0.0.1:6379",
            "prefix": "p",
            "user": "u",
            "password_file": "f",
            "tls_ca": "c",
        },
    ],
    "domains": {
        "a": {"key_file": "k", "users": ["root", 0], "quota_bytes": {"host": "32 MiB"}, "share": 1},
        "b": {"key_command": ["vault", "read"], "key_timeout_s": 1.0},
        "default": {"key_fd": 3},
    },
    "keyring": "r",
    "audit": "a",
    "record": "q",
    "engine": {"deadline_s": 5.0, "model_digest": "d"},
    "scrub": {"every_s": 1e6, "rate": 0},
    "tls": {"cert": "c", "key": "k", "ca": "a"},
    "tokens": {"key_file": "k", "file": "t"},
    "register": {"members": "etcd://h:1", "address": "tcp://h:1", "id": "x", "zone": "z"},
    "http": {"listen": "unix:///run/h/http.sock", "token_file": "t"},
    "traces": {"endpoint": "http://c", "share": 1},
    "segment_blocks": 1,
    "target_connections": 16,
    "lease_s": 1,
    "socket_group": "root",
    "transport": "tcp",
}


def leaves(value, path=()):
    """Yield the path of every value that is no list or mapping."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*path, key))
    else:
        yield path


@pytest.mark.parametrize("path", [*leaves(EVERYTHING)], ids=lambda at: ".".join(map(str, at)))
def test_an_unusable_value_is_a_one_line_error_that_names_its_key(path):
    for value in ("a\0b", "/a\0b", "unix:///a\0b", "\ud800", "/\udfff", 16**4_000, -(16**4_000)):
        data = copy.deepcopy(EVERYTHING)
        section = data
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = value
        with pytest.raises(ConfigError) as caught:
            parse(data)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1_000
        names = (str(path[-1]), "cannot name a file", "is not UTF-8 text")
        assert any(name in str(caught.value) for name in names)


def test_the_configuration_with_every_option_is_valid():
    assert parse({**EVERYTHING, "scrub": {}}).record.endswith("/q")


@pytest.mark.parametrize("text", ["0x" + "f" * 4_000, "0b" + "1" * 20_000, "1:" * 3_000 + "1"])
@pytest.mark.parametrize("line", ["lease_s: {}", "x: [[{}]]", "? {}\n: 1"])
def test_a_long_integer_in_a_file_is_an_error_of_one_line(tmp_path, text, line):
    file = tmp_path / "node.yaml"
    file.write_text(line.format(text))
    with pytest.raises(ConfigError, match=r"line 1, column \d+: an integer of more than 64 bits"):
        load(str(file))


def test_a_text_that_is_not_utf_8_is_an_error_of_one_line(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text('listen: "/run/\\udc80.sock"\ntiers: [{kind: host, capacity: 64 MiB}]\n')
    with pytest.raises(ConfigError, match=r"^listen: node address .* cannot name a socket"):
        load(str(file))
