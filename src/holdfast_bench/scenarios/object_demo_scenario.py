"""The steps of `holdfast demo --object`: a fresh node serves a context from a bucket.

Node A saves a context, whose blocks go to its disk and to the bucket. Then both nodes end, their
disks are emptied, and node B starts: it has only the bucket.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError, HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.regular_file import replace_file
from holdfast_bench.harness.completion import MeasuredCompletion, ask
from holdfast_bench.harness.node import DISK_BYTES, HOST_BYTES, NodeUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import holdfast_kv_transfer
from holdfast_bench.scenarios.demo_scenario import (
    ANSWER_TOKENS,
    DEMO_COVER_DEADLINE_MS,
    DemoSettings,
    DemoStep,
    start_engines,
)
from holdfast_bench.scenarios.miss_causes import MissWatch

BUCKET_S = 120.0
"""Longest wait until the bucket holds the context, in seconds."""

UNSPECIFIED = "external_unspecified"
"""vLLM's word for a source that it has no name for."""

_KEY_BYTES = 32


def walk(setting: DemoSettings) -> Generator[DemoStep]:
    """Run the demo and yield each step when it is done; all processes end with the iteration."""
    try:
        from holdfast_bench.peers.seaweed_server import BUCKET, SeaweedServer
    except ImportError as error:
        raise ConfigError(
            f"--object: obstore is not installed ({error}); install holdfast-kv[object]"
        ) from error
    [prompts], tell = setting.prompts, setting.tell
    context_tokens = len(prompts.context)
    blocks = context_tokens // BLOCK_TOKENS
    with ExitStack() as stack:
        tell("SeaweedFS starts, with an empty bucket")
        server = stack.enter_context(closing(SeaweedServer(setting.folder / "seaweed")))
        server.start()
        key = setting.folder / "domain.key"
        replace_file(key, secrets.token_bytes(_KEY_BYTES))
        bucket: dict[str, object] = {
            "kind": "object",
            "url": f"s3://{BUCKET}/demo",
            "endpoint": server.endpoint,
            "credentials_file": str(server.write_credentials(setting.folder / "credentials")),
            "gather_s": 1,
        }
        domains = {"default": {"key_file": str(key)}}
        node = stack.enter_context(_start(setting, "node-a", bucket, domains))
        [engine] = start_engines(stack, setting, {"engine-a": _kv_transfer(node)})
        ask(engine, prompts.unrelated, ANSWER_TOKENS)

        tell("the engine of node A reads the document for the first time")
        cold = ask(engine, prompts.first, ANSWER_TOKENS)
        again = ask(engine, prompts.first, ANSWER_TOKENS)
        if again.tokens.local != context_tokens:
            raise HoldfastError(
                f"no reference: the engine had {again.tokens.local} tokens of its own instead of "
                f"{context_tokens}; is its cache too small for this model?"
            )
        right, token_bytes = again.answer, node.token_bytes()
        _wait_in_bucket(node, 2 * blocks)
        yield DemoStep("saved_by_a", [cold], cold.answer.equals(right), fetched=0)

        tell("both nodes' disks are emptied; node B starts with nothing but the bucket")
        engine.process.stop()
        node.kill()
        for name in ("node-a", "node-b"):
            shutil.rmtree(setting.folder / name / "disk", ignore_errors=True)
        fresh = stack.enter_context(_start(setting, "node-b", bucket, domains))
        [second] = start_engines(stack, setting, {"engine-b": _kv_transfer(fresh)})
        ask(second, prompts.question, ANSWER_TOKENS)
        watch = MissWatch(fresh, second.process.log)
        asked = ask(second, prompts.first, ANSWER_TOKENS)
        plan = watch.plan()
        step = DemoStep(
            "fresh_node_b",
            [asked],
            asked.answer.equals(right),
            context_tokens,
            _expected_source(fresh, asked),
            token_bytes,
            str(plan["reason"]) if plan else "",
        )
        yield step if step.ok else msgspec.structs.replace(step, cause=watch.why())


def _start(
    setting: DemoSettings,
    name: str,
    bucket: dict[str, object],
    domains: dict[str, dict[str, str]],
) -> NodeUnderTest:
    """Start a node with memory, a disk and the bucket."""
    folder: Path = setting.folder / name
    tiers = [
        {"kind": "host", "capacity": HOST_BYTES},
        {"kind": "disk", "path": str(folder / "disk"), "capacity": DISK_BYTES},
        bucket,
    ]
    return NodeUnderTest(
        folder, settings={"tiers": tiers, "domains": domains, "plan": setting.plan}
    )


def _kv_transfer(node: NodeUnderTest) -> dict[str, object]:
    return holdfast_kv_transfer(node.address, DEMO_COVER_DEADLINE_MS)


def _expected_source(node: NodeUnderTest, asked: MeasuredCompletion) -> str:
    """Return the source that an engine names for blocks of the node's object tier.

    vLLM has no name for an object store. Its own word counts if the node read from the bucket and
    not from its disk.
    """
    read = {str(tier["tier"]): int(tier["read_bytes"]) for tier in node.status()["tiers"]}
    name = next(tier for tier in read if tier.startswith("object"))
    is_unnamed = set(asked.tokens.fetched) == {UNSPECIFIED}
    return UNSPECIFIED if is_unnamed and read[name] and not read["disk"] else name


def _wait_in_bucket(node: NodeUnderTest, blocks: int) -> None:
    """Return once the bucket holds at least this number of blocks."""

    def held() -> bool:
        tiers = node.status()["tiers"]
        records = sum(int(each["records"]) for each in tiers if each["tier"].startswith("object"))
        return records >= blocks and node.status()["waiting_to_write"] == 0

    wait_until(node.process, held, BUCKET_S, f"holding {blocks} blocks in the bucket")
