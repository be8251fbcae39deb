"""A real node's metrics, health and status over HTTP equal what it did."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import resources

import pytest

from holdfast.metrics import METRICS, kind_of
from holdfast.node.http.pages import PageStatus
from holdfast.probe import free_port
from holdfast.status import (
    ActivityStatus,
    CurveStatus,
    DomainStatus,
    EngineLockStatus,
    MemberStatus,
    PageLockStatus,
    PlanStatus,
    TargetStatus,
    TierStatus,
)

KEYS = 6


def fetch(url, headers=None):
    request = urllib.request.Request(url, headers=headers or {})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


def values(text):
    """Return the value of each sample by its name and labels as text."""
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("holdfast_"): float(value) for name, value in samples}


@pytest.fixture
def url(start_node):
    port = free_port()
    node = start_node(http={"listen": f"tcp://127.0.0.1:{port}"})
    return node, f"http://127.0.0.1:{port}"


def test_a_scrape_equals_an_independent_count(url, engine, names):
    node, base = url
    one, keys = engine(node.address), names("context", KEYS)
    one.save(keys)
    lease = one.read(keys)
    one.until_on_disk(KEYS)
    found = values(fetch(f"{base}/metrics"))
    assert lease is not None
    assert found['calls_total{operation="save",outcome="ok"}'] == 1
    assert found['call_blocks_total{operation="save"}'] == KEYS
    assert found['call_blocks_total{operation="fetch"}'] == KEYS
    assert found['call_seconds_count{operation="fetch"}'] == 1
    assert found["blocks"] == KEYS
    assert found['tier_records{tier="disk"}'] == KEYS
    assert found["ready"] == 1
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert found[f"process_{name}"] > 0
    assert found["process_open_fds"] < found["process_max_fds"]
    assert found["audit_lost_lines_total"] == 0


def test_every_metric_that_is_scraped_is_in_the_table(url):
    _, base = url
    names = re.findall(r"^# TYPE holdfast_(\S+) (\S+)$", fetch(f"{base}/metrics"), re.MULTILINE)
    assert names
    assert all(name in METRICS and kind_of(name) == kind for name, kind in names)


def test_probes_status_page_and_events_are_served(url):
    _, base = url
    assert fetch(f"{base}/healthz") == "ok\n"
    assert fetch(f"{base}/readyz") == "ready\n"
    assert "<title>Holdfast node</title>" in fetch(base)
    with urllib.request.urlopen(f"{base}/events", timeout=60) as stream:
        status = json.loads(stream.readline().removeprefix(b"data: "))
    assert status["activity"]["prompts"] == 0
    assert (status["role"], status["host"]) == ("node", socket.gethostname())
    assert [address[:8] for address in status["addresses"]] == ["unix:///"]
    assert json.loads(fetch(f"{base}/status.json"))["incarnation"] == status["incarnation"]


def test_a_token_guards_all_but_the_probes(start_node, tmp_path):
    port, file = free_port(), tmp_path / "token"
    file.write_text("secret-of-16-bytes\n")
    file.chmod(0o600)
    node = start_node(http={"listen": f"tcp://0.0.0.0:{port}", "token_file": str(file)})
    base = f"http://127.0.0.1:{port}"
    assert fetch(f"{base}/readyz") == "ready\n"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        fetch(f"{base}/metrics")
    held = {"Authorization": "Bearer secret-of-16-bytes"}
    assert "holdfast_info" in fetch(f"{base}/metrics", held)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        fetch(f"{base}/metrics", {"Authorization": "Bearer guess-of-16-bytes"})
    node.stop()
    assert "a wrong token over HTTP" in (node.folder / "disk" / "audit.jsonl").read_text()


GET_AS_USER = """
import encodings.idna, os, sys, urllib.error, urllib.request
os.setgid(65534)
os.setuid(int(sys.argv[1]))
for url in sys.argv[2:]:
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            print(reply.status, reply.read(1_000))
    except urllib.error.HTTPError as error:
        print(error.status, error.read())
"""


def got_by(user, *urls):
    command = [sys.executable, "-c", GET_AS_USER, str(user), *urls]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_another_user_of_the_machine_reads_probes_only(start_node):
    port, open_port = free_port(), free_port()
    node = start_node(http={"listen": f"tcp://127.0.0.1:{port}"})
    base = f"http://127.0.0.1:{port}"
    paths = ("/metrics", "/status.json", "/events", "/")
    for answer in got_by(4242, *(f"{base}{path}" for path in paths)):
        assert answer.startswith("403 ")
        assert "belongs to user 4242" in answer
        assert "present a token (http.token_file), or set http.open: true" in answer
    assert got_by(4242, f"{base}/healthz", f"{base}/readyz") == ["200 b'ok\\n'", "200 b'ready\\n'"]
    assert got_by(0, f"{base}/metrics")[0].startswith("200 ")
    node.stop()
    assert "user 4242" in (node.folder / "disk" / "audit.jsonl").read_text()
    start_node(http={"listen": f"tcp://127.0.0.1:{open_port}", "open": True})
    assert got_by(4242, f"http://127.0.0.1:{open_port}/metrics")[0].startswith("200 ")


def test_metrics_come_over_a_unix_socket(start_node, tmp_path):
    place = tmp_path / "http.sock"
    start_node(http={"listen": f"unix://{place}"})
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place))
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert client.makefile("rb").read().endswith(b"\r\n\r\nok\n")
    assert place.stat().st_mode & 0o777 == 0o600


def test_a_port_in_use_is_named_before_anything_is_opened(start_node, holdfast, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        file = tmp_path / "second.yaml"
        config = {
            "listen": f"unix://{tmp_path}/second.sock",
            "tiers": [{"kind": "host", "capacity": 16 << 20}],
            "http": {"listen": address},
        }
        file.write_text(json.dumps(config))
        done = holdfast("serve", "--config", file)
    assert done.returncode == 3
    assert f"http.listen: '{address}': Address already in use; choose another" in done.stderr


SHOWN = {
    "status": PageStatus,
    "target": TargetStatus,
    "locks": PageLockStatus,
    "holder": EngineLockStatus,
    "d": DomainStatus,
    "a": ActivityStatus,
    "one": TierStatus,
    "m": MemberStatus,
    "p": PlanStatus,
    "curve": CurveStatus,
}


def test_the_page_reads_only_fields_that_a_status_has():
    page = resources.files("holdfast.node.http").joinpath("status.html").read_text()
    script = page[page.index("<script>") :]
    for name, kind in SHOWN.items():
        read = set(re.findall(rf"(?<![.\w]){name}\??\.(\w+)", script))
        assert read
        assert read <= set(kind.__struct_fields__), name
