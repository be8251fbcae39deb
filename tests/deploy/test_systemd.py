"""The systemd units are valid, hardened, and agree with the configurations beside them."""

import configparser
import re
import subprocess
import sys

import pytest

from holdfast.config import load

UNITS = ["node", "target"]
EXPOSURE_MAX = 20
"""systemd's exposure score of a unit, in tenths: 0 is the least exposed, 100 the most."""


@pytest.fixture
def analyze(find_program):
    """Run systemd-analyze; returns the finished process."""
    program = find_program("systemd", "systemd-analyze")

    def run(*arguments):
        return subprocess.run(
            [program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def options_of(unit):
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(unit)
    return parser["Service"]


@pytest.mark.parametrize("name", UNITS)
def test_systemd_analyze_verifies_the_units_without_errors(deploy, tmp_path, analyze, name):
    unit = tmp_path / f"holdfast-{name}.service"
    text = (deploy / "systemd" / unit.name).read_text()
    assert "/opt/holdfast/bin/holdfast serve" in text
    # The program and its man page are not installed on this machine.
    text = text.replace("/opt/holdfast/bin/holdfast", sys.executable)
    unit.write_text(re.sub("^Documentation=.*$", "", text, flags=re.MULTILINE))
    done = analyze("verify", unit)
    found = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, found) == (0, [])


@pytest.mark.parametrize("name", UNITS)
def test_the_units_stay_within_the_systemd_exposure_threshold(deploy, analyze, name):
    unit = deploy / "systemd" / f"holdfast-{name}.service"
    done = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", unit)
    assert done.returncode == 0, done.stdout


def test_nodes_with_the_same_domain_key_open_each_others_blocks(deploy):
    config = load(str(deploy / "config" / "node.yaml"), {"tiers.0.capacity": "64 MiB"})
    assert config.shares
    assert not config.keyring, "a key ring of its own would give each node other data keys"


@pytest.mark.parametrize("name", UNITS)
def test_the_folders_of_a_unit_are_those_of_its_configuration(deploy, name):
    options = options_of(deploy / "systemd" / f"holdfast-{name}.service")
    shipped = deploy / "config" / f"{name}.yaml"
    assert options["ExecStart"].endswith(f"serve --config /etc/holdfast/{name}.yaml")
    assert options["Type"] == "notify"
    config = load(str(shipped), {"tiers.0.capacity": "64 MiB"})
    assert config.node_address == f"unix:///run/{options['RuntimeDirectory']}/node.sock"
    assert config.tiers[1].path.startswith(f"/var/lib/{options['StateDirectory']}/")
