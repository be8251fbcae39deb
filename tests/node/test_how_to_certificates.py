"""The commands of the page about certificates make files with which a host and a target connect."""

import re
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast.probe import free_port
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, blocks_for, tokens_for
from holdfast.wire.remote.credentials import TlsFiles

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "certificates.md"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Run the page's commands for two machines; returns their TLS files by name."""
    folder = tmp_path_factory.mktemp("tls")
    authority, machine = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)

    def run(script, **variables):
        subprocess.run(
            ["bash", "-euc", script],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", **variables},
            capture_output=True,
            check=True,
        )

    run(authority)
    for name in ("flash-1", "host-1"):
        run(machine, NAME=name, ADDRESS="127.0.0.1")
    return {
        name: TlsFiles(*(str(folder / file) for file in (f"{name}.crt", f"{name}.key", "ca.pem")))
        for name in ("flash-1", "host-1")
    }


def test_a_host_saves_to_a_target_and_fetches_from_it(files, tmp_path, start_node):
    address = start_node(
        listen=f"tcp://127.0.0.1:{free_port()}", tls=msgspec.structs.asdict(files["flash-1"])
    ).address
    members = tmp_path / "members.yaml"
    members.write_text(f"members: [{{id: flash-1, address: '{address}'}}]\n")
    key = tmp_path / "team.key"
    key.touch(mode=0o600)
    key.write_bytes(bytes(range(32)))
    config = tmp_path / "host.yaml"
    config.write_text(
        f"tiers: [{{kind: host, capacity: 64 MiB}}, {{kind: pool, members: {members}}}]\n"
        f"domains: {{default: {{key_file: {key}, seal: false}}}}\n"
        f"tls: {{cert: {files['host-1'].cert}, key: {files['host-1'].key}, "
        f"ca: {files['host-1'].ca}}}\n"
    )
    tokens, blocks = tokens_for(1), blocks_for(1)
    with holdfast.open(str(config)) as store:
        store.session(FINGERPRINT).save(tokens, blocks)
    with holdfast.open(str(config)) as store:
        found = np.zeros_like(blocks)
        landed = store.session(FINGERPRINT).fetch(tokens, into=found, deadline_s=60)
    assert landed.sources == {"pool": BLOCKS}
    assert (found == blocks).all()
