"""Two nodes, a process each, over one folder that is mounted twice: one saves, the other reads."""

import secrets
import subprocess
from contextlib import ExitStack

import numpy as np
import pytest

import holdfast
from holdfast.limits import MIB
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until

TOKENS = BLOCKS * LAYOUT.block_tokens
WITHIN_S = 60.0


@pytest.fixture
def bound(tmp_path):
    """One folder, bound to two paths."""
    shared, *paths = (tmp_path / name for name in ("shared", "mount-a", "mount-b"))
    for path in (shared, *paths):
        path.mkdir()
    with ExitStack() as undo:
        for path in paths:
            done = subprocess.run(
                ["mount", "--bind", shared, path], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"mount: {done.stderr.strip()}")
            undo.callback(subprocess.run, ["umount", "-l", path], check=True)
        yield paths


@pytest.fixture(params=["bound", "juicefs"])
def mounts(request, tmp_path):
    """Two paths of one new folder, each with a mount of its own."""
    if request.param == "bound":
        paths = request.getfixturevalue("bound")
    else:
        paths = request.getfixturevalue("juicefs").paths
    return [path / f"cache-{tmp_path.name}" for path in paths]


@pytest.fixture
def nodes(mounts, tmp_path):
    """Two nodes with a disk each, and the shared folder below it."""
    key = tmp_path / "domain.key"
    key.write_bytes(secrets.token_bytes(32))
    key.chmod(0o600)
    with ExitStack() as stack:
        found = []
        for name, path in zip("ab", mounts, strict=True):
            files = {"kind": "files", "path": str(path), "capacity": "1 GiB", "gather_s": 0}
            files |= {"poll_s": 1, "ask_s": 10, "deadline_s": 20}
            tiers = [
                {"kind": "host", "capacity": "32 MiB"},
                {"kind": "disk", "path": str(tmp_path / name / "disk"), "capacity": "64 MiB"},
                files,
            ]
            settings = {"tiers": tiers, "domains": {"default": {"key_file": str(key)}}}
            node = NodeUnderTest(tmp_path / name, 32 * MIB, 64 * MIB, settings=settings)
            found.append(stack.enter_context(node))
        yield found


def save(node, seed):
    """Save a context on a node, and wait until all tiers have it."""
    with holdfast.open(node.address, domain="default") as store:
        assert store.session(FINGERPRINT).save(tokens_for(seed), blocks_for(seed)) == BLOCKS
        wait_until(node.process, lambda: not store.status().waiting_to_write, WITHIN_S)


def fetched(node, seed):
    """Return the sources of a context that a node fetches, with every byte checked."""
    with holdfast.open(node.address, domain="default") as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(blocks_for(seed))
        wait_until(node.process, lambda: session.cover(tokens_for(seed)) == TOKENS, WITHIN_S)
        landed = session.fetch(tokens_for(seed), into=found, deadline_s=WITHIN_S)
        assert landed.blocks == BLOCKS
        assert (found == blocks_for(seed)).all()
        return [(name.rstrip("0123456789"), number) for name, number in landed.sources.items()]


def test_a_node_reads_from_the_shared_folder_what_another_node_saved_there(nodes):
    writer, reader = nodes
    save(writer, 1)
    assert fetched(reader, 1) == [("files", BLOCKS)]


def test_what_a_killed_node_had_saved_is_read_by_the_other_and_by_itself_again(nodes):
    writer, reader = nodes
    save(writer, 1)
    writer.kill()
    assert fetched(reader, 1) == [("files", BLOCKS)]
    save(reader, 2)
    writer.start()
    assert fetched(writer, 2) == [("files", BLOCKS)]
