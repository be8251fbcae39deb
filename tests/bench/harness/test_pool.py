"""A pool under test: silent targets answer again, also if one of them has ended."""

import subprocess
from contextlib import ExitStack
from types import SimpleNamespace

from holdfast_bench.harness.pool import PoolUnderTest, SilentTargets


def test_a_target_that_ended_does_not_stop_the_network_from_being_mended(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    calls = []
    network = SimpleNamespace(
        cut=lambda address: calls.append(("cut", address)),
        mend=lambda address: calls.append(("mend", address)),
    )
    with ExitStack() as stack:
        pool = PoolUnderTest(stack, tmp_path, network)
        pool.targets["t"] = SimpleNamespace(process=SimpleNamespace(pid=ended.pid))
        pool._addresses["t"] = "tcp://10.0.0.1:1"
        with pool.silent(SilentTargets.CUT):
            pass
    assert calls == [("cut", "tcp://10.0.0.1:1"), ("mend", "tcp://10.0.0.1:1")]
