"""The commands of the page about deployment start a node and a target under systemd.

systemd runs as process 1 in namespaces of its own, with this machine's files below a layer in
memory that is gone afterwards: nothing is installed or started on this machine itself.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import holdfast

pytest.importorskip("cryptography", reason="the shipped configuration seals blocks")

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 200

# $0: an empty folder for the layer; $1: the files that it starts with. The layer is mounted where
# only this process and its children see it.
BOOT = """
set -eu
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs "$0"
mkdir "$0/work" "$0/root"
cp -a "$1" "$0/layer"
mount -t overlay overlay -o "lowerdir=/,upperdir=$0/layer,workdir=$0/work" "$0/root"
shift
exec systemd-nspawn --quiet --directory="$0/root" --register=no --keep-unit --private-network "$@"
"""

# This Python and its packages, at paths that every user may read.
PYTHON = f"""#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/source:/opt/packages
exec /opt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]} "$@"
"""

PROGRAM = """#!/bin/sh
exec /opt/holdfast/bin/python -m holdfast "$@"
"""

UNIT = """
[Unit]
After=basic.target
SuccessAction=exit
FailureAction=exit

[Service]
Type=oneshot
WorkingDirectory=/try
ExecStart=/bin/bash -euxo pipefail /try/commands
StandardOutput=file:/try/output
StandardError=file:/try/log
"""

JOURNAL_ON_ERROR = "trap 'journalctl --no-pager --unit \"holdfast-*\" >&2' ERR\n"

ENGINE = """
import sys
import time

import numpy as np

import holdfast
from holdfast.testing.embedded import FINGERPRINT, blocks_for, tokens_for

with holdfast.open("unix:///run/holdfast/node.sock") as store:
    session = store.session(FINGERPRINT)
    if sys.argv[1] == "save":
        print("saved", session.save(tokens_for(1), blocks_for(1)))
    else:
        until_s = time.monotonic() + 60
        while not store.status().recovered and time.monotonic() < until_s:
            time.sleep(0.05)
        found = np.zeros_like(blocks_for(1))
        landed = session.fetch(tokens_for(1), into=found)
        print("fetched", landed.blocks, (found == blocks_for(1)).all())
"""


@pytest.fixture
def systemd(tmp_path, find_program):
    """Run a bash script as root under systemd; returns what it printed.

    Its folder is `tmp_path`. Skips if systemd cannot be started in namespaces.
    """
    if os.geteuid():
        pytest.skip("only root can start systemd in namespaces")
    find_program("systemd", "systemctl")
    find_program("systemd-container", "systemd-nspawn")
    for name, text, mode in (
        ("opt/holdfast/bin/python", PYTHON, 0o755),
        ("opt/holdfast/bin/holdfast", PROGRAM, 0o755),
        ("etc/systemd/system/commands.service", UNIT, 0o644),
    ):
        file = tmp_path / "machine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
    (tmp_path / "mounted").mkdir()
    folders = {
        sys.base_prefix: "python",
        sysconfig.get_path("purelib"): "packages",
        Path(holdfast.__file__).parents[1]: "source",
    }
    boot = [
        *("unshare", "--mount", "bash", "-c", BOOT, tmp_path / "mounted", tmp_path / "machine"),
        f"--machine=holdfast-{os.getpid()}",
        f"--bind={tmp_path}:/try",
        *(f"--bind-ro={here}:/opt/{there}" for here, there in folders.items()),
        *("--boot", "--", "systemd.unit=commands.service"),
    ]

    def run(script):
        (tmp_path / "commands").write_text(JOURNAL_ON_ERROR + script)
        done = subprocess.run(
            boot,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        output = tmp_path / "output"
        if not output.exists():
            *_, said = ["nothing is said", *done.stdout.splitlines(), *done.stderr.splitlines()]
            pytest.skip(f"systemd cannot be started in namespaces: {said}")
        assert done.returncode == 0, output.read_text() + (tmp_path / "log").read_text()
        return output.read_text()

    return run


def commands(page):
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


@pytest.mark.timeout(WITHIN_S + 60)
def test_units_start_as_the_page_says(tmp_path, deploy, systemd):
    authority, certificate, *_ = commands("certificates")
    install, node, target, completion, _, folders, *_ = commands("deploy")
    *packages, user = install.splitlines()
    extra, completion = completion.splitlines()
    assert all("/opt/holdfast" in line for line in (*packages, extra)), "the fixture does these"
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    [domain_key] = re.findall(r"a domain key \(`(.*?)`", page)
    shutil.copytree(deploy, tmp_path / "deploy")
    for config in (tmp_path / "deploy" / "config").iterdir():
        config.write_text(re.sub(r"capacity: \d+ [GT]iB", "capacity: 64 MiB", config.read_text()))
    (tmp_path / "members.yaml").write_text(
        'members:\n  - {id: flash-1, address: "tcp://127.0.0.1:7441"}\n'
    )
    (tmp_path / "engine.py").write_text(ENGINE)
    said = systemd(f"""
NAME=tls ADDRESS=127.0.0.1
{authority}
{certificate}
mv ca.pem ca.crt
{domain_key}
{user}
{target}
{node}
systemctl is-active holdfast-node holdfast-target
/opt/holdfast/bin/holdfast inspect pool
{completion}
bash -n /etc/bash_completion.d/holdfast
/opt/holdfast/bin/python engine.py save
systemctl restart holdfast-node
/opt/holdfast/bin/python engine.py fetch
/opt/holdfast/bin/holdfast inspect
systemctl stop holdfast-node holdfast-target
systemctl show --property Result holdfast-node holdfast-target
journalctl --no-pager --unit holdfast-node
{folders}
stat --format "%u:%g %a %n" /run/holdfast /var/lib/holdfast
""")
    assert said.startswith("active\nactive\npool1: 1 member")
    assert "flash-1      tcp://127.0.0.1:7441  serving" in said
    assert "saved 3\nfetched 3 True\n" in said
    assert said.count("Result=success") == 2
    assert "recovered: 3 blocks" in said
    assert said.endswith("7441:7441 755 /run/holdfast\n7441:7441 700 /var/lib/holdfast\n")
