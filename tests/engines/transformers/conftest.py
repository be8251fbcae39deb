import pytest

import holdfast
from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest


@pytest.fixture
def store():
    with holdfast.open(host="64 MiB") as opened:
        yield opened


@pytest.fixture
def node(tmp_path_factory):
    one = NodeUnderTest(tmp_path_factory.mktemp("n") / "node", 64 * MIB, 64 * MIB)
    yield one
    one.process.stop()
