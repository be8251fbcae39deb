"""Failpoints: off they do nothing, armed they end the process at the pass that was asked for."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import config, failpoints
from holdfast.errors import ConfigError

SOURCE = Path(failpoints.__file__).parent


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm("")


def test_every_failpoint_is_in_the_code_once():
    found = [
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r'\breach\("(\w+)"\)', path.read_text())
    ]
    assert sorted(found) == sorted(failpoints.POINTS)


def test_a_failpoint_that_is_not_armed_does_nothing():
    failpoints.reach("snapshot")
    failpoints.arm("region_close:1")
    failpoints.reach("snapshot")


def test_a_failpoint_disarmed_while_it_is_reached_does_nothing(monkeypatch):
    class DisarmedMeanwhile(dict):
        """Empty after the first question whether it has a name, as after `arm` in a thread."""

        def __contains__(self, name):
            found = super().__contains__(name)
            self.clear()
            return found

    monkeypatch.setattr(failpoints, "_armed", DisarmedMeanwhile(snapshot=1))
    failpoints.reach("snapshot")


def test_the_process_is_killed_at_the_armed_pass_of_a_failpoint():
    script = (
        "from holdfast import failpoints; failpoints.arm('snapshot:3')\n"
        "for number in range(1, 5): print(number, flush=True); failpoints.reach('snapshot')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"1\n2\n3\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("regionseal", "HOLDFAST_FAILPOINT: 'regionseal' is no failpoint; use one of: disk_open"),
        ("snapshot:0", "HOLDFAST_FAILPOINT: 'snapshot:0': a pass is counted from 1"),
        (
            "snapshot:x",
            "HOLDFAST_FAILPOINT: 'snapshot:x': a pass is counted from 1; use snapshot:1",
        ),
    ],
)
def test_an_unknown_failpoint_is_refused(text, words, monkeypatch):
    monkeypatch.setenv("HOLDFAST_FAILPOINT", text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        config.arm_failpoint()
    monkeypatch.delenv("HOLDFAST_FAILPOINT")
    config.arm_failpoint()
