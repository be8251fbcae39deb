"""Alert rules and dashboard: every metric exists, rules fire as told, a real Prometheus answers."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest
import yaml

from holdfast.metrics import HISTOGRAMS, METRICS
from holdfast.probe import free_port

NAME = re.compile(r"\bholdfast_[a-z_]+")
PROCESS_NAME = re.compile(r"\bprocess_[a-z_]+[a-z]\b")
UNIT = re.compile("_(bucket|sum|count)$")
READY_S = 120


def panels(deploy):
    """The dashboard's queries, by panel, with its variables set."""
    board = json.loads((deploy / "grafana" / "holdfast.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "30s").replace("$instance", ".*")
            assert "$" not in query, query
            yield panel["title"], query


def rules(deploy):
    (group,) = yaml.safe_load((deploy / "prometheus" / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def test_every_metric_of_rules_and_dashboard_is_one_of_ours(deploy):
    queries = [query for _, query in panels(deploy)] + [rule["expr"] for rule in rules(deploy)]
    queries.append((deploy.parent / "docs" / "how-to" / "observe.md").read_text())
    for query in queries:
        for name in NAME.findall(query):
            short = name.removeprefix("holdfast_")
            assert short in METRICS or UNIT.sub("", short) in HISTOGRAMS, (name, query)
        assert all(name in METRICS for name in PROCESS_NAME.findall(query)), query


def test_the_page_lists_every_rule(deploy):
    text = (deploy.parent / "docs" / "how-to" / "observe.md").read_text()
    listed = re.findall(r"^\| `(Holdfast\w+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(rule["alert"] for rule in rules(deploy))


def test_every_rule_says_what_to_do(deploy):
    for rule in rules(deploy):
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "remedy"}


def test_promtool_accepts_the_rules_and_they_fire_as_told(deploy, unpack_program):
    promtool = unpack_program("prometheus", "promtool")
    for arguments in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [promtool, *arguments],
            cwd=deploy / "prometheus",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def scraped(tmp_path, unpack_program):
    """A real node that a real Prometheus scrapes; returns the node's URL and a query function."""
    prometheus = unpack_program("prometheus", "prometheus")
    node_port, port = free_port(), free_port()
    node_file, file = tmp_path / "node.yaml", tmp_path / "prometheus.yaml"
    node_file.write_text(
        json.dumps(
            {
                "listen": [f"unix://{tmp_path}/node.sock", "tcp://127.0.0.1:0"],
                "tiers": [
                    {"kind": "host", "capacity": 16 << 20},
                    {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": 64 << 20},
                ],
                "http": {"listen": f"tcp://127.0.0.1:{node_port}"},
            }
        )
    )
    targets = [{"targets": [f"127.0.0.1:{node_port}"]}]
    file.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [{"job_name": "holdfast", "static_configs": targets}],
            }
        )
    )
    commands = [
        [sys.executable, "-m", "holdfast", "serve", "--config", str(node_file)],
        [
            prometheus,
            f"--config.file={file}",
            f"--storage.tsdb.path={tmp_path}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    ]
    with (tmp_path / "log").open("wb") as log:
        running = [
            subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"})
            for command in commands
        ]

    def query(text):
        wanted = urllib.parse.urlencode({"query": text})
        url = f"http://127.0.0.1:{port}/api/v1/query?{wanted}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]["result"]

    yield query, (tmp_path / "log").read_text
    for process in running:
        process.terminate()
        process.wait(60)


def test_every_query_of_the_dashboard_has_an_answer_from_a_real_node(deploy, scraped):
    query, log = scraped
    end_s, missing = time.monotonic() + READY_S, ["all"]
    quiet = {  # what a node without traffic, a pool or peers has no samples of
        *("Fetches by outcome", "Duration of a fetch", "Evictions, waiting writes"),
        *("Pool members: how soon they answer", "Plans: error of the expected first token"),
        *("Prompt tokens loaded", "Quotas and write budgets: used"),
    }
    while missing and time.monotonic() < end_s:
        time.sleep(0.5)
        try:
            missing = [
                title for title, text in panels(deploy) if title not in quiet and not query(text)
            ]
        except OSError:  # it does not listen yet
            missing = ["all"]
    assert not missing, log()
    for _, text in panels(deploy):
        query(text)  # the others are understood, too
    (ready,) = query("holdfast_ready")
    assert ready["value"][1] == "1"
