"""Addresses of nodes and members: what is read, what is refused, and what is written."""

import pytest

from holdfast.address import HostPort, page_url, socket_path, tcp_address, tcp_endpoint
from holdfast.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("tcp://10.0.0.7:7441", HostPort("10.0.0.7", 7441)),
        ("tcp://flash-1.example.org:1", HostPort("flash-1.example.org", 1)),
        ("tcp://my_host:65535", HostPort("my_host", 65_535)),
        ("tcp://[fd00::7]:7441", HostPort("fd00::7", 7441)),
        ("tcp://[fe80::7%eth0]:7441", HostPort("fe80::7%eth0", 7441)),
        ("tcp://0.0.0.0:0", HostPort("0.0.0.0", 0)),
    ],
)
def test_host_and_port_are_read(address, endpoint):
    assert tcp_endpoint(address) == endpoint


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.7:7441",
        "tcp://10.0.0.7",
        "tcp://:7441",
        "tcp://a b:80",
        "tcp://x/y:80",
        "tcp://[host]:80",
        "tcp://[]:80",
        "tcp://fd00::7:80",
        "tcp://h:65536",
        "tcp://h:-1",
        "tcp://h:٣",
        "tcp://h:80\n",
        "tcp://h:" + "1" * 5_000,
    ],
)
def test_invalid_tcp_addresses_are_refused(address):
    with pytest.raises(ConfigError, match=r"is not tcp://host:port, such as tcp://10\.0\.0\.7"):
        tcp_endpoint(address)


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:7441", "tcp://", "tcp://flash-1"])
def test_a_target_address_is_refused_as_a_node_address(address):
    with pytest.raises(ConfigError, match="a pool's target, which serves other nodes; name a node"):
        socket_path(address)


def test_a_port_below_the_minimum_is_refused():
    with pytest.raises(ConfigError):
        tcp_endpoint("tcp://h:0", port_min=1)


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 1), ("h.example.org", 80), ("::1", 9)])
def test_an_address_survives_a_round_trip(host, port):
    assert tcp_endpoint(tcp_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("page", "address", "url"),
    [
        ("tcp://10.0.0.7:9464", "tcp://10.1.0.7:7441", "http://10.0.0.7:9464/"),
        ("tcp://0.0.0.0:9464", "tcp://flash-1:7441", "http://flash-1:9464/"),
        ("tcp://[::]:9464", "tcp://[fd00::7]:7441", "http://[fd00::7]:9464/"),
        ("tcp://127.0.0.1:9464", "tcp://127.0.0.1:7441", "http://127.0.0.1:9464/"),
        ("tcp://127.0.0.1:9464", "tcp://10.0.0.7:7441", ""),
        ("tcp://localhost:9464", "tcp://flash-1:7441", ""),
        *(
            (page, "tcp://10.0.0.7:7441", "")
            for page in ("", "tcp://h:0", "javascript:1", "unix:///n")
        ),
    ],
)
def test_a_page_has_a_url_if_a_host_that_reaches_the_target_can_open_it(page, address, url):
    assert page_url(page, address) == url
