"""`holdfast verify`: everything is read, by a running node or by nobody else."""

import json

import pytest

from holdfast.assemble import open_store
from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.config import load
from holdfast.wire.local import messages as m
from holdfast_bench.campaigns.contexts import Contexts, chain_of

FINGERPRINT = b"fingerprint-16-b".hex()
MIB = 1 << 20


def verified(holdfast, *arguments):
    done = holdfast("verify", *arguments, "--json", "-")
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def configured(tmp_path):
    """A file of a node with a disk."""
    tiers = [
        {"kind": "host", "capacity": 16 * MIB},
        {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": 16 * MIB},
    ]
    file = tmp_path / "node.yaml"
    file.write_text(json.dumps({"listen": f"unix://{tmp_path}/n.sock", "tiers": tiers}))
    return str(file)


def test_verify_reads_every_copy_of_a_running_node_and_fails_on_a_wrong_byte(holdfast, node, save):
    client = save(node, 3)
    code, answer = verified(holdfast, "--node", node)
    assert (code, answer["checked"], answer["bad"], answer["dropped"]) == (0, 3, [], 0)
    done = holdfast("verify", FINGERPRINT, "--rate", "200MB/s", "--node", node)
    assert "verified 3 stored copies, " in done.stdout
    assert "; all are intact" in done.stdout
    client.arena.view[HEADER_BYTES + 5] ^= 1
    code, answer = verified(holdfast, "--node", node)
    assert (code, answer["dropped"]) == (1, 1)
    assert [(fault["tier"], fault["outcome"]) for fault in answer["bad"]] == [("host", "corrupt")]
    assert client.call(m.Status(), m.ReportReply, 60).data["blocks"] == 2
    assert verified(holdfast, "--node", node)[0] == 0
    client.close()


def test_verify_offline_reads_the_folder_of_the_disk_tier(holdfast, configured, tmp_path):
    keys = chain_of("verify", 4)
    with open_store(load(configured)) as store:
        Contexts(store, 5_000).save(keys)
    options = ["--offline", "--config", configured]
    assert verified(holdfast, *options)[1]["checked"] == len(keys)
    blocks = tmp_path / "disk" / "blocks.holdfast"
    image = bytearray(blocks.read_bytes())
    image[image.index(keys[1]) + 500] ^= 1
    blocks.write_bytes(image)
    code, answer = verified(holdfast, *options)
    assert (code, answer["checked"], answer["dropped"]) == (1, len(keys), 1)
    assert answer["bad"] == [{"tier": "disk", "outcome": "corrupt"}]
    code, answer = verified(holdfast, *options)
    assert (code, answer["checked"]) == (0, len(keys) - 1)


def test_verify_offline_does_not_create_a_missing_folder(holdfast, configured, tmp_path):
    done = holdfast("verify", "--offline", "--config", configured)
    assert done.returncode == 2
    assert f'tiers.1.path: "{tmp_path}/disk" has no blocks.holdfast' in done.stderr
    assert not (tmp_path / "disk").exists()


def test_a_folder_in_use_is_left_alone(holdfast, configured):
    with open_store(load(configured)):
        done = holdfast("verify", "--offline", "--config", configured)
    assert done.returncode == 3
    assert "is in use by process" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["xyz"], "'xyz' is not 32 hex digits"),
        (["--rate", "fast"], "--rate fast: not a size"),
        (["--rate", "0"], "--rate 0: nothing would be read"),
        (["--offline", "--node", "unix:///n.sock"], "--offline and --node exclude each other"),
    ],
)
def test_ambiguous_arguments_are_wrong_usage(holdfast, arguments, words):
    done = holdfast("verify", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
