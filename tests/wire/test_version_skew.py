"""Nodes, targets and their clients of different versions, in processes of their own, over the wire.

A later version sends fields that this one does not know. An earlier one does not send the fields
that were added since, each of which has a default.
"""

import json
import subprocess
import sys

import pytest

from holdfast.probe import free_port

OTHER_VERSION = """
import msgspec
from holdfast.wire import frame

class Encoder:
    def encode_into(self, message, buffer, offset):
        data = msgspec.to_builtins(message, builtin_types=(bytes,))
        if VERSION == "later":
            data["a_field_of_a_later_version"] = [1, b"x"]
        if VERSION == "earlier":
            for field in msgspec.structs.fields(message):
                default = field.default
                if field.default_factory is not msgspec.NODEFAULT:
                    default = field.default_factory()
                if default is not msgspec.NODEFAULT and getattr(message, field.name) == default:
                    data.pop(field.encode_name, None)
        buffer[offset:] = msgspec.msgpack.encode(data)

frame._ENCODER = Encoder()
"""

NODE = """
import sys
from holdfast.cli import main

sys.exit(main(sys.argv[1:]))
"""

CLIENT = """
import sys
import numpy as np
import holdfast
from holdfast.buffers import aligned_buffer
from holdfast.limits import MIB
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, blocks_for, tokens_for
from holdfast.testing.payloads import is_right, key_of, namespace_of, record_of
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials

node, target = sys.argv[1:]
with holdfast.open(node) as store:
    session = store.session(FINGERPRINT)
    tokens, blocks = tokens_for(1), blocks_for(1)
    session.save(tokens, blocks)
    assert session.cover(tokens) == len(tokens)
    found = np.zeros_like(blocks)
    assert session.fetch(tokens, into=found).blocks == BLOCKS
    assert (found == blocks).all()

namespace, keys = namespace_of(MIB), [key_of(i) for i in range(4)]
client = TargetClient(target, Credentials())
assert client.put([record_of(namespace, key) for key in keys], 60) == ["ok"] * 4
into = [aligned_buffer(namespace.slot_bytes) for _ in keys]
assert client.get(namespace, keys, into, 60).blocks == 4
assert all(is_right(record, namespace, key) for key, record in zip(keys, into))
assert client.stats(20)[0].blocks >= 4
client.close()
"""


def program(version, text):
    """The arguments that run a program as another version of holdfast would."""
    other = f"VERSION = {version!r}\n{OTHER_VERSION}" if version != "this" else ""
    return [sys.executable, "-c", other + text]


@pytest.mark.parametrize(
    ("node", "client"),
    [("this", "later"), ("this", "earlier"), ("later", "this"), ("earlier", "this")],
)
def test_versions_of_one_protocol_understand_each_other(node, client, tmp_path):
    local, remote = f"unix://{tmp_path}/n.sock", f"tcp://127.0.0.1:{free_port()}"
    file = tmp_path / "node.yaml"
    tiers = [{"kind": "host", "capacity": "64 MiB"}]
    file.write_text(json.dumps({"listen": [local, remote], "tiers": tiers}))
    with subprocess.Popen(
        [*program(node, NODE), "serve", "--config", str(file)], stdout=subprocess.PIPE
    ) as serving:
        try:
            assert serving.stdout.readline().startswith(b"READY")
            done = subprocess.run(
                [*program(client, CLIENT), local, remote],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            serving.terminate()
    assert done.returncode == 0, done.stderr
