"""A host whose token permits only part: nothing fails, and the host says what does not work."""

import contextlib
import re
import time

import pytest

import holdfast
from holdfast.cli import main
from holdfast.limits import MIB
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetService
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, blocks_for, tokens_for
from holdfast.wire.remote import token

KEY = bytes(range(32))


@pytest.fixture
def target():
    """A target that requires tokens; yields its store, its counters and its address."""
    with contextlib.ExitStack() as undo:
        options = StoreOptions(serves_peers=True)
        store = undo.enter_context(Store(16 * MIB, [], {"default": b"s" * 32}, options))
        store.start()
        service = TargetService(store)
        entry = EntryRules(token_keys=lambda: [KEY])
        server = TargetServer(bound := bind("tcp://127.0.0.1:0"), service, entry)
        server.start()
        undo.callback(server.close)
        yield store, service.counters, address_of(bound)


@pytest.fixture
def config(tmp_path, target):
    """The configuration of a host; call to replace its token by one with these permissions."""
    (tmp_path / "members.yaml").write_text(f"members: [{{id: t0, address: '{target[2]}'}}]\n")
    for name, data in (("domain.key", b"d" * 32), ("token", b"")):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(data)
    file = tmp_path / "host.yaml"
    file.write_text(
        f"tiers: [{{kind: host, capacity: 16 MiB}}, "
        f"{{kind: pool, members: {tmp_path}/members.yaml, deadline_s: 60, ask_s: 60}}]\n"
        f"domains: {{default: {{key_file: {tmp_path}/domain.key, seal: false}}}}\n"
        f"tokens: {{file: {tmp_path}/token}}\n"
    )

    def issue(*may):
        (tmp_path / "token").write_text(token.issue(KEY, "host-a", may, 600, time.time()))
        return str(file)

    return issue


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_writes_wait_until_a_token_permits_them(target, config, caplog):
    store, counters, _ = target
    with holdfast.open(config("read")) as host:
        session = host.session(FINGERPRINT)
        session.cover(tokens_for(1))  # connects
        for seed in range(5):
            session.save(tokens_for(seed), blocks_for(seed))
        until(lambda: host.status().waiting_to_write == 0)
        pool = host.status().shared["pool"]
        assert pool.limits == "read-only token"
        assert pool.reachable
        assert [member.trouble for member in pool.members] == [""]
        assert [member.phase for member in pool.members] == ["closed"]
        assert sum(tier.failures for tier in host.status().tiers) == 0
        assert (counters.refused, store.status().blocks) == (0, 0)
        assert "is gone" not in caplog.text
        config("read", "write")
        until(lambda: store.status().blocks == 5 * BLOCKS)
        assert host.status().shared["pool"].limits == "token without delete"


@pytest.mark.parametrize(
    ("may", "words"),
    [
        (("read",), "read-only token: this node may read at its pool's targets: it writes no new"),
        (("read", "write"), "token without delete: .*: records of erased domains and retired data"),
        (("write", "delete"), "token without read: .*: it finds and fetches nothing there"),
        (token.VERBS, ""),
    ],
)
def test_doctor_names_operations_that_a_token_does_not_permit(config, capsys, may, words):
    code = main(["doctor", "--config", config(*may)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " tokens.file " in line]
    assert line.startswith("WARNING" if words else "ok")
    assert re.search(words, line)
    assert code == ("read" not in may)  # members cannot be checked
