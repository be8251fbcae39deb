"""The commands that put Holdfast behind vLLM, run as the page shows them, with a small model."""

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.probe import free_port

pytest.importorskip("vllm")

from holdfast_bench.harness.model import make
from holdfast_bench.harness.process import ChildProcess, wait_until
from holdfast_bench.harness.server import ENGINE_ENVIRONMENT

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "vllm.md"
READY_S = 240.0
SMALL = (
    "--max-model-len 1024 --kv-cache-memory-bytes 64000000 --enforce-eager --served-model-name m"
)
TOKENS = 600


@pytest.mark.timeout(2 * READY_S)
def test_an_engine_saves_to_the_node_that_the_page_starts(tmp_path):
    text = PAGE.read_text().replace("/run/holdfast/node.sock", f"{tmp_path}/node.sock")
    shown = re.search(r"```sh\n(.*?)```", text, re.DOTALL)[1]
    port = free_port()
    shown = shown.replace("MODEL", f"{make('tiny')} --port {port} {SMALL}")
    serve, engine = re.split(r"\n(?=python)", shown)
    env = ENGINE_ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    with ExitStack() as stack:

        def start(name, line):
            argv = ["bash", "-c", f"exec {line.strip()}"]
            process = ChildProcess(name, argv, tmp_path / f"{name}.log", env)
            return stack.enter_context(process)

        small = "--set tiers.0.capacity='64 MiB' --set tiers.1.capacity='64 MiB'"
        node = start("node", f"{serve} {small}")
        wait_until(node, lambda: "READY" in node.log.read_text(), READY_S)
        vllm = start("engine", engine)
        wait_until(vllm, lambda: answers(port, "/health"), READY_S)
        body = {"model": "m", "prompt": [7 + i % 400 for i in range(TOKENS)], "max_tokens": 2}
        assert answers(port, "/v1/completions", body)["usage"]["prompt_tokens"] == TOKENS
        [inspect] = set(re.findall(r"^\$ (holdfast inspect .*)$", text, re.MULTILINE))
        found = subprocess.check_output(["bash", "-c", inspect], env=env, text=True)
    assert f": {TOKENS // 128} blocks\n" in found


def answers(port, path, body=None):
    """Send a request; return the answer, or nothing if there is no server yet."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            return json.loads(answer.read() or b"true")
    except OSError:
        return None
