"""A real target that registers itself in a real etcd: seen as it comes, serves, drains and goes."""

import itertools
import os
import signal

import pytest

from holdfast.limits import MIB
from holdfast.membership.etcd_client import EtcdOptions
from holdfast.membership.etcd_source import EtcdSource
from holdfast.probe import free_port
from holdfast.testing.membership_contract import ReportedViews
from holdfast_bench.harness.node import NodeUnderTest

NUMBERS = itertools.count()
ENDS_S = 60


@pytest.fixture
def prefix():
    """A prefix of its own for each test."""
    return f"/target-{next(NUMBERS)}"


@pytest.fixture
def heard(etcd_url, prefix):
    """What a client of the pool is told."""
    heard = ReportedViews()
    source = EtcdSource(EtcdOptions(endpoints=(etcd_url,), prefix=f"{prefix}/"))
    source.watch(heard)
    yield heard
    source.close()


@pytest.fixture
def start(etcd_url, prefix, tmp_path):
    """Call with further options to start the target; ended with the test."""
    nodes = []

    def start(url=etcd_url, **options):
        members = url.replace("http://", "etcd://") + prefix
        also = f"tcp://127.0.0.1:{free_port()}"
        register = {"members": members, "id": "flash-1", **options}
        settings = {"register": register}
        node = NodeUnderTest(tmp_path / "target", 32 * MIB, 64 * MIB, settings=settings, also=also)
        node.target_address = also
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        node.kill()


def states(heard):
    seen = [members[0].state if members else "gone" for members in heard.lists]
    return [state for state, _ in itertools.groupby(seen)]


def serving(members):
    return [member.state for member in members] == ["serving"]


def test_a_started_target_registers_with_its_configured_fields(start, heard):
    node = start(weight=2.5, zone="rack-7")
    [member] = heard.until(serving)
    assert (member.id, member.address) == ("flash-1", node.target_address)
    assert (member.weight, member.zone) == (2.5, "rack-7")
    assert member.incarnation


def test_a_configured_address_is_registered_instead_of_the_listening_one(start, heard):
    start(address="tcp://flash-1.example:7441")
    [member] = heard.until(serving)
    assert member.address == "tcp://flash-1.example:7441"


def test_a_stopped_target_announces_draining_serves_on_and_then_leaves(start, heard):
    node = start(drain_s=5)
    heard.until(serving)
    os.kill(node.process.pid, signal.SIGTERM)
    heard.until(lambda members: [member.state for member in members] == ["draining"])
    assert node.status()["tiers"], "it serves while it drains"
    heard.until(lambda members: members == ())
    assert states(heard)[-3:] == ["serving", "draining", "gone"]
    assert node.process._popen.wait(ENDS_S) == 0


def test_a_second_signal_ends_a_target_without_waiting_for_the_drain(start, heard):
    node = start(drain_s=600)
    heard.until(serving)
    os.kill(node.process.pid, signal.SIGTERM)
    heard.until(lambda members: [member.state for member in members] == ["draining"])
    os.kill(node.process.pid, signal.SIGTERM)
    assert node.process._popen.wait(ENDS_S) == 0
    heard.until(lambda members: members == ())


def test_a_restarted_target_is_the_same_member_with_a_new_incarnation(start, heard):
    node = start()
    [first] = heard.until(serving)
    node.restart()
    [second] = heard.until(lambda m: serving(m) and m[0].incarnation != first.incarnation)
    assert (second.id, second.address) == (first.id, first.address)


def test_a_target_serves_without_etcd(start):
    node = start(url=f"http://127.0.0.1:{free_port()}", drain_s=0.1)
    assert node.status()["tiers"]
    os.kill(node.process.pid, signal.SIGTERM)
    assert node.process._popen.wait(ENDS_S) == 0
    assert "registration of flash-1 in etcd" in node.process.tail()
