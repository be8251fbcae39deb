"""Who may open a node's socket and sessions behind it, as a configuration can say it."""

import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError

HOST = {"kind": "host", "capacity": "64 MiB"}
SOCKET = "unix:///run/h/node.sock"


def read(users, listen=SOCKET, **options):
    domains = {"acme": {"key_file": "/acme.key", "users": users}}
    return parse({"listen": listen, "tiers": [HOST], "domains": domains, **options})


def test_users_may_be_names_or_numbers():
    config = read(["alice", 1001], socket_group="engines")
    assert config.domains["acme"].users == ["alice", 1001]
    assert config.socket_group == "engines"
    assert read([], listen="tcp://127.0.0.1:1").domains["acme"].users == []


@pytest.mark.parametrize(
    ("users", "options", "words"),
    [
        ([-1], {}, r"domains\.acme\.users\.0: -1 is not from 0 to 4294967294"),
        (["a", 65534], {}, r"domains\.acme\.users\.1: 65534 .*stands for any unknown user"),
        ([""], {}, r"domains\.acme\.users\.0: '' does not name a user"),
        (["nobody"], {}, r"domains\.acme\.users\.0: 'nobody' does not name a user"),
        ([1], {"listen": "tcp://127.0.0.1:1"}, r"acme\.users: this node has no Unix socket"),
        ([], {"socket_group": 7}, r"socket_group: 7 could open the socket, but no domain"),
        ([1], {"socket_group": 65534}, r"socket_group: 65534 is not from 0"),
    ],
)
def test_ambiguous_or_ineffective_users_are_refused(users, options, words):
    with pytest.raises(ConfigError, match=words):
        read(users, **options)
