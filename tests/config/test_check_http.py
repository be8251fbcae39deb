"""The address of the metrics and the dashboard: any error names its key."""

import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError


def read(**http):
    tiers = [{"kind": "host", "capacity": "64 MiB"}]
    return parse({"listen": "unix:///run/h/node.sock", "tiers": tiers, "http": http}).http


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:9464", r"address '127\.0\.0\.1:9464' is neither unix:///path nor tcp://host:p"),
        (f"unix:///{'d' * 107}", r"node address .* the path has 108 bytes"),
        ("tcp://127.0.0.1", r"address 'tcp://127\.0\.0\.1' is not tcp://host:port"),
    ],
)
def test_an_address_that_cannot_be_parsed_is_named_with_its_key(address, words):
    with pytest.raises(ConfigError, match=rf"^http\.listen: {words}"):
        read(listen=address)


def test_an_http_address_reachable_from_other_machines_needs_a_token_or_open():
    with pytest.raises(ConfigError, match=r"^http\.listen: .* can be reached from other machines"):
        read(listen="tcp://0.0.0.0:9464")
    assert read(listen="tcp://0.0.0.0:9464", open=True).open
    assert read(listen="tcp://0.0.0.0:9464", token_file="/t").token_file
    for address in ("unix:///run/h/http.sock", "tcp://127.0.0.1:9464"):
        assert read(listen=address).listen == address
