"""Peers that are refused again and again fill neither the log nor the audit log."""

import contextlib
import json
import logging
import time
from types import SimpleNamespace

import pytest

from holdfast.errors import RefusedError
from holdfast.keys.denials import DENIALS_APART_S
from holdfast.node import refusals
from holdfast.node.refusals import RefusalLog
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.local.reconnecting_client import ReconnectingClient

WRONG_DOMAIN = m.Hello(m.PROTOCOL, "engine-7", b"f" * 16, 4096, 16, domain="wrong")


def test_a_repeated_warning_is_counted_and_logged_at_intervals(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(refusals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log = RefusalLog(logging.getLogger("test"))
    for second in range(200):
        log.report("user 1000", f"expired {second} s ago", f"refused: expired {second} s ago")
        now[0] += 1.0
    log.report("user 1001", "expired 3 s ago", "refused: expired 3 s ago, another user")
    assert caplog.messages == [
        "refused: expired 0 s ago",
        f"{DENIALS_APART_S:.0f} more times: user 1000: expired 0 s ago",
        f"{2 * DENIALS_APART_S:.0f} more times: user 1000: expired 0 s ago",
        "refused: expired 3 s ago, another user",
    ]


@pytest.mark.parametrize("hello", [WRONG_DOMAIN, m.Hello(m.PROTOCOL + 1, "engine-7")])
def test_a_node_logs_repeated_refusals_of_an_engine_once(start_node, tmp_path, hello):
    node = start_node(audit=str(tmp_path / "audit.jsonl"))
    for _ in range(20):
        with pytest.raises(RefusedError):
            Client(node.address, hello, 60)
    node.stop()
    assert node.said().count("refused: ") == 1
    if hello is WRONG_DOMAIN:
        lines = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
        assert [line["unsaid"] for line in lines if line["action"] == "denied"] == [0, 19]


def test_a_refused_engine_backs_off_and_connects_after_a_node_restart(start_node, tmp_path):
    node = start_node()
    with contextlib.closing(ReconnectingClient(node.address, WRONG_DOMAIN, 10, 0.2)) as engine:
        assert engine.wait(3) is None
        until_s = time.monotonic() + 60
        while "'wrong' is not configured" not in engine.failure:
            assert time.monotonic() < until_s, engine.failure
            time.sleep(0.01)
        (key := tmp_path / "wrong.key").write_bytes(b"k" * 32)
        key.chmod(0o600)
        node.stop()
        node.config["domains"] = {"wrong": {"key_file": str(key)}}
        node.start()
        assert engine.wait(60) is not None
