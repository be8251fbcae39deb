"""Real vLLM with two data-parallel replicas: each loads what the other saved."""

import re
from contextlib import ExitStack, closing

import pytest

pytest.importorskip("vllm")

from served_engines import (
    BLOCK,
    HELD,
    ServedEngines,
    check_equal,
    words,
    written_model,
)

from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import PROTOCOL, Hello, ReportReply, Status
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import holdfast_kv_transfer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.soak,  # two replicas start within a minute or two
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("shared_memory"),
]

BOTH_WAYS = (("two/0", "two/1"), ("two/1", "two/0"))


def test_replicas_load_what_the_other_saved_in_every_kv_group(tmp_path_factory):
    """Replicas of a model with experts do not run: vLLM's CPU build cannot gather their tokens."""
    folder = tmp_path_factory.mktemp("replicas")
    model = written_model(folder, "gemma3")
    with ExitStack() as stack:
        engines = ServedEngines(folder, stack)
        engines.start("two", model, layout="exact", replicas=2)
        engines.wait_ready()
        for writer, reader in BOTH_WAYS:
            check_equal(*engines.pass_on(writer, reader, groups=2))


def test_replicas_share_portable_contexts_with_each_other_and_an_engine_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("portable")
    model = written_model(folder, "gemma3")
    with ExitStack() as stack:
        engines = ServedEngines(folder, stack)
        engines.start("two", model, replicas=2)
        engines.start("one", model)
        engines.wait_ready()
        for writer, reader in (*BOTH_WAYS, ("one", "two/1")):
            check_equal(*engines.pass_on(writer, reader, groups=2))
            engines.forget(writer)
            engines.forget(reader)
        engines.load("one", words("two/0 writes"))


def test_replicas_without_the_address_of_a_node_have_one_private_node(tmp_path_factory):
    prompt = words("private")
    with ExitStack() as stack:
        engines = ServedEngines(tmp_path_factory.mktemp("private"), stack)
        engines.start("two", transfer=holdfast_kv_transfer("", 60_000), replicas=2)
        engines.wait_ready()
        process = engines.servers["two"].process
        # Each replica logs where its blocks are.
        named = re.findall(r"Holdfast at (unix://\S+): exact blocks", process.log.read_text())
        assert len(named) == 2
        assert len(set(named)) == 1
        answers = []
        with closing(Client(named[0], Hello(PROTOCOL, "test"), 60.0)) as node:

            def saved():
                status = node.call(Status(), ReportReply, 60.0).data
                return status["blocks"] == HELD // BLOCK

            for replica in ("two/0", "two/1"):
                answers.append(engines.ask(replica, prompt))
                wait_until(process, saved, 60, "saving its blocks")
        cold, warm = answers
        assert (cold.tokens.fetched, warm.tokens.fetched) == ({}, {"host": HELD})
        check_equal(cold.answer, warm.answer)
