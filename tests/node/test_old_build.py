"""A rolling upgrade with the last build before record format 2: misses, and never a wrong byte.

The old build is taken from this repository's history and runs in processes of its own. Targets and
hosts of the two builds refuse each other by the version of their protocol, so a host treats the
target as unreachable; an upgraded target opens the disk of the old one.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.probe import free_port

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
ENVELOPE = "src/holdfast/blocks/envelope.py"
FORMAT_1 = re.compile(r"^FORMAT\b.*= 1$", re.MULTILINE)
READY_S = 240.0
BLOCKS = 7

USER = """
import json, sys
import numpy as np
import holdfast

config, verb, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
layout = holdfast.Layout.portable(
    layers=2, kv_heads=2, head_size=64, dtype="float16", block_tokens=128
)
meaning = {"model": "m", "positions": "rope", "adapter": "none", "kv_quantisation": "none"}
if hasattr(holdfast.Fingerprint, "portable"):
    model = holdfast.Fingerprint.portable(layout, kv_scales="none", **meaning)
else:
    model = holdfast.Fingerprint(layout=layout, **meaning)
random = np.random.default_rng(seed)
tokens = random.integers(0, 30_000, 7 * 128).tolist()
blocks = random.normal(size=(7, layout.raw_bytes // 2)).astype(np.float16)
with holdfast.open(config) as store:
    session = store.session(model)
    said = {}
    if verb == "save":
        said["saved"] = session.save(tokens, blocks)
    found = np.zeros_like(blocks)
    landed = session.fetch(tokens, into=found, deadline_s=20.0)
    count = landed.tokens // 128
    said["fetched"] = count
    said["right"] = bool((found[:count] == blocks[:count]).all())
print(json.dumps(said))
"""


def git(*arguments):
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=False, check=True
    ).stdout


@pytest.fixture(scope="module")
def old_build(tmp_path_factory):
    """Return the folder of the sources of the last commit that wrote records of format 1."""
    folder = tmp_path_factory.mktemp("old")
    try:
        commits = git("rev-list", "HEAD", "--", ENVELOPE).decode().split()
        for commit in commits:
            if FORMAT_1.search(git("show", f"{commit}:{ENVELOPE}").decode()):
                break
        else:
            pytest.skip("the history of this clone has no commit with records of format 1")
        archive = git("archive", commit, "src")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this is no clone with its history: {error}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder / "src"


class Target:
    """`holdfast serve` of one build; another build may take over its folder and address."""

    def __init__(self, folder):
        self.address = f"tcp://127.0.0.1:{free_port()}"
        tiers = [
            {"kind": "host", "capacity": "64 MiB"},
            {"kind": "disk", "path": str(folder / "disk"), "capacity": "64 MiB"},
        ]
        self._file, self._log = folder / "target.yaml", folder / "target.log"
        self._file.write_text(json.dumps({"listen": self.address, "tiers": tiers}))
        self._processes = []

    def start(self, source):
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "serve", "--config", str(self._file)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(source)},
            )
        assert process.stdout is not None
        self._processes.append(process)
        ready, _, _ = select.select([process.stdout], [], [], READY_S)
        assert ready, "the target is not ready in time"
        assert process.stdout.readline().startswith(b"READY"), self.log()

    def is_running(self):
        return self._processes[-1].poll() is None

    def log(self):
        return self._log.read_text()

    def stop(self):
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()
        self._processes.clear()


class Host:
    """A program with an embedded store over a pool of one target, in a process of one build."""

    def __init__(self, folder, target):
        (folder / "domain.key").write_bytes(bytes(range(32)))
        (folder / "domain.key").chmod(0o600)
        members = folder / "members.yaml"
        members.write_text(json.dumps({"members": [{"id": "target", "address": target.address}]}))
        pool = {"kind": "pool", "members": str(members), "deadline_s": 20.0, "ask_s": 20.0}
        self._config, self._pool = folder / "host.json", pool
        self._domains = {"default": {"key_file": str(folder / "domain.key")}}

    def run(self, source, verb, seed, **pool):
        tiers = [{"kind": "host", "capacity": "64 MiB"}, self._pool | pool]
        config = {"tiers": tiers, "domains": self._domains}
        self._config.with_suffix(".yaml").write_text(json.dumps(config))
        argv = [sys.executable, "-c", USER, str(self._config.with_suffix(".yaml")), verb, str(seed)]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"PYTHONPATH": str(source)},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["right"], said
        return said

    def run_until_fetched(self, source, seed, blocks, within_s=60.0):
        end = time.monotonic() + within_s
        while (said := self.run(source, "fetch", seed))["fetched"] != blocks:
            assert time.monotonic() < end, said


@pytest.fixture
def pair(tmp_path):
    """Return a target and a host that uses it."""
    with contextlib.ExitStack() as undo:
        target = Target(tmp_path)
        undo.callback(target.stop)
        yield target, Host(tmp_path, target)


NEW = ROOT / "src"


def test_a_new_host_saves_and_misses_beside_an_old_target(old_build, pair):
    target, host = pair
    target.start(old_build)
    assert host.run(old_build, "save", 1)["fetched"] == BLOCKS
    host.run_until_fetched(old_build, 1, BLOCKS)
    said = host.run(NEW, "save", 2, codec="planes")
    assert said == {"saved": BLOCKS, "fetched": BLOCKS, "right": True}
    assert host.run(NEW, "fetch", 2, codec="planes")["fetched"] == 0
    assert host.run(NEW, "fetch", 1)["fetched"] == 0
    assert target.is_running()
    host.run_until_fetched(old_build, 1, BLOCKS)


def test_an_old_host_saves_and_misses_beside_a_new_target(old_build, pair):
    target, host = pair
    target.start(NEW)
    host.run(NEW, "save", 1, codec="planes")
    host.run_until_fetched(NEW, 1, BLOCKS)
    said = host.run(old_build, "save", 2)
    assert said == {"saved": BLOCKS, "fetched": BLOCKS, "right": True}
    assert host.run(old_build, "fetch", 2)["fetched"] == 0
    assert host.run(old_build, "fetch", 1)["fetched"] == 0
    assert target.is_running()
    host.run_until_fetched(NEW, 1, BLOCKS)


def test_a_target_that_is_upgraded_and_downgraded_serves_no_block_of_the_other_build(
    old_build, pair
):
    target, host = pair
    for number, (mine, other) in enumerate(
        [(old_build, NEW), (NEW, old_build), (old_build, NEW)], start=1
    ):
        target.start(mine)
        host.run(mine, "save", number)
        host.run_until_fetched(mine, number, BLOCKS)
        for earlier in range(1, number):
            host.run(mine, "fetch", earlier)  # asserts that what is found is right
        assert host.run(other, "fetch", number)["fetched"] == 0
        target.stop()
