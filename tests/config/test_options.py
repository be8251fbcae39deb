"""Where a node listens, and what it shows and asks for there."""

import pytest

from holdfast.config import parse


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


def test_a_token_key_is_enough_to_be_reached(tmp_path):
    config = parse(data(listen="tcp://10.0.0.7:7441", tokens={"key_file": "key"}), tmp_path)
    assert config.tokens.key_file == f"{tmp_path}/key"
