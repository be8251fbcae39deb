"""A real node, and a store that is embedded or that node's."""

import contextlib
import sys

import pytest

import holdfast
from holdfast.errors import NodeGoneError
from holdfast_bench.harness.process import ChildProcess, wait_until


class Node:
    """A real node with a host and a disk tier, killed and started at will."""

    def __init__(self, folder):
        self._folder = folder
        self.address = f"unix://{folder}/node.sock"
        self.record = folder / "requests.jsonl"
        self._file = folder / "node.yaml"
        self._file.write_text(
            f"listen: {self.address}\n"
            f"record: {self.record}\n"
            "tiers:\n"
            "  - {kind: host, capacity: 64 MiB}\n"
            f"  - {{kind: disk, path: {folder}/disk, capacity: 64 MiB}}\n"
        )
        self.process = None

    def start(self):
        argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(self._file)]
        self.process = ChildProcess("node", argv, self._folder / "node.log", {})
        wait_until(self.process, self._serves, 60)

    def _serves(self):
        with contextlib.suppress(NodeGoneError):
            holdfast.open(self.address, domain="default").close()
            return True
        return False


@pytest.fixture(scope="module")
def lasting_node(tmp_path_factory):
    """A node for the tests of a file that neither kill nor count it."""
    one = Node(tmp_path_factory.mktemp("n"))
    one.start()
    yield one
    one.process.kill()


@pytest.fixture
def node(tmp_path_factory):
    one = Node(tmp_path_factory.mktemp("n"))
    one.start()
    yield one
    one.process.kill()


@pytest.fixture(params=["embedded", "node"])
def store(request, tmp_path):
    if request.param == "embedded":
        opened = holdfast.open(host="64 MiB", disk="64 MiB", path=str(tmp_path / "disk"))
    else:
        opened = holdfast.open(request.getfixturevalue("node").address, domain="default")
    with opened:
        yield opened
