"""`holdfast tier` against a running node: a drive is replaced, and engines see misses at most."""

import json
import shutil
import time

import pytest

from holdfast.testing.payloads import payload_of
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

FINGERPRINT = b"fingerprint-16-b"
PAYLOAD_BYTES = 4096
KEYS = [bytes([i]) * 16 for i in range(4)]

YAML = """\
listen: unix://{0}/node.sock
tiers:
  - {{kind: host, capacity: 16 MiB}}
  - {{kind: disk, path: {0}/disk, capacity: 16 MiB}}
"""


@pytest.fixture
def clients():
    """Connect an engine's client and an operator's."""
    made = []

    def connect(address):
        hello = m.Hello(m.PROTOCOL, "test", FINGERPRINT, PAYLOAD_BYTES, 16)
        made.extend(Client(address, each, 60) for each in (hello, m.Hello(m.PROTOCOL, "test")))
        return made

    yield connect
    for each in made:
        each.close()


def save(client):
    reserved = client.call(m.Reserve(b"".join(KEYS), FINGERPRINT, 0), m.Reserved, 60)
    for key, place in zip(KEYS, reserved.places, strict=True):
        at = place + 128
        client.arena.view[at : at + PAYLOAD_BYTES] = payload_of(key, PAYLOAD_BYTES)
    client.call(m.Commit(reserved.ticket), m.Committed, 60)


def fetched(client):
    """Fetch the blocks, check their bytes, and return how many there are."""
    found = client.call(m.Fetch(b"".join(KEYS), 60.0), m.Fetched, 60)
    for key, place in zip(KEYS, found.places, strict=False):
        at = place + 128
        assert bytes(client.arena.view[at : at + PAYLOAD_BYTES]) == payload_of(key, PAYLOAD_BYTES)
    client.call(m.Release(found.lease), m.Released, 60)
    return len(found.places)


def test_a_new_drive_gets_the_default_key_so_that_a_restart_finds_its_blocks(
    clients, serving, tmp_path
):
    config = tmp_path / "node.yaml"
    config.write_text(YAML.format(tmp_path))
    _, address = serving("--config", config)
    client, operator = clients(address)
    save(client)
    wait_for(operator, lambda disk: disk["records"] == len(KEYS))
    (tmp_path / "disk").rename(tmp_path / "pulled")
    wait_for(operator, lambda disk: disk["replaced"] and disk["records"] == len(KEYS))
    key = (tmp_path / "pulled" / "default.key").read_bytes()
    until = time.monotonic() + 60
    while not (tmp_path / "disk" / "default.key").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert (tmp_path / "disk" / "default.key").read_bytes() == key


def status(client):
    return client.call(m.Status(), m.ReportReply, 60).data


def disk_of(client):
    return next(tier for tier in status(client)["tiers"] if tier["tier"] == "disk")


def wait_for(client, what):
    until = time.monotonic() + 60
    while not what(disk_of(client)):
        assert time.monotonic() < until, disk_of(client)
        time.sleep(0.05)


def test_a_drive_is_lost_shown_and_replaced_without_a_restart(clients, holdfast, serving, tmp_path):
    config = tmp_path / "node.yaml"
    config.write_text(YAML.format(tmp_path))
    _, address = serving("--config", config)
    client, operator = clients(address)
    save(client)
    wait_for(operator, lambda disk: disk["records"] == len(KEYS))

    (tmp_path / "disk").rename(tmp_path / "pulled")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "photo.jpg").touch()
    wait_for(operator, lambda disk: "photo.jpg" in disk["away"])
    assert fetched(client) == len(KEYS), "memory has them"
    shown = holdfast("inspect", "--config", config).stdout
    assert "disk     away" in shown
    found = holdfast("doctor", "--config", config)
    assert found.returncode == 1
    assert "photo.jpg" in found.stdout
    assert "away" in holdfast("top", "--config", config, "--views", "1").stdout

    refused = holdfast("tier", "replace", "disk", "--config", config)
    assert refused.returncode != 0
    assert "photo.jpg" in refused.stderr
    assert "--path" in refused.stderr
    new = tmp_path / "new"
    done = holdfast("tier", "replace", "disk", "--path", new, "--config", config)
    assert done.returncode == 0, done.stderr
    assert f"set the tier's path to {new}" in done.stdout
    wait_for(operator, lambda disk: disk["records"] == len(KEYS))
    assert "disk     replaced" in holdfast("inspect", "--config", config).stdout

    asked = holdfast("tier", "detach", "disk", "--config", config)
    assert asked.returncode == 4
    assert "4 blocks on disk" in asked.stderr
    assert "add --yes" in asked.stderr
    done = holdfast("tier", "detach", "disk", "--yes", "--config", config, "--json", "-")
    assert json.loads(done.stdout)["blocks"] == len(KEYS)
    assert "detached" in disk_of(operator)["away"]
    shutil.rmtree(new)
    done = holdfast("tier", "replace", "disk", "--path", tmp_path / "pulled", "--config", config)
    assert done.returncode == 0, done.stderr
    wait_for(operator, lambda disk: disk["records"] >= len(KEYS))
    assert fetched(client) == len(KEYS)
