"""Real SGLang: its factory and host pools, and servers on the CPU over a real node.

SGLang is installed in an environment of its own, on the first run (3 GB).
"""

import json
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import small_models

import holdfast
from holdfast.engines import cached_models
from holdfast.limits import BLOCK_TOKENS, MIB
from holdfast_bench.harness import model
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.transformers_engine import largest_difference
from holdfast_bench.peers import sglang_environment
from holdfast_bench.peers.sglang_server import (
    PAGE_TOKENS,
    SglangServer,
    SglangServerOptions,
    holdfast_storage,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

PROMPT = [100 + 37 * i % 30_000 for i in range(1_000)]
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
TOKENS = 8
OTHER_MODELS = {"gemma3": cached_models.WINDOWS, "mla": cached_models.FULL}
"""Models beside one with keys and values of all tokens in every layer, and their kinds."""

YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 0.7,
    "mscale_all_dim": 0.7, "original_max_position_embeddings": 1_024,
}  # fmt: skip
SETTINGS = {"mla": {"rope_parameters": YARN, "moe_layer_freq": 1, "scoring_func": "softmax"}}
"""What SGLang reads of a published model, and transformers does not write. On CPUs SGLang computes
latent attention with the rope of DeepSeek's models only.
"""

SCRIPT = Path(__file__).with_name("sglang_pools.py")


@pytest.fixture(scope="module", autouse=True)
def environment():
    sglang_environment.install()


@pytest.fixture
def started(tmp_path):
    """Start nodes and servers that end with the test."""
    with ExitStack() as stack:

        def node(name="n"):
            return stack.enter_context(NodeUnderTest(tmp_path / name, 64 * MIB, 256 * MIB))

        def server(node, layout="exact", folder=None, **options):
            storage = {"storage": "dynamic", "extra": holdfast_storage(node.address, layout)}
            given = SglangServerOptions(folder or model.make("tiny"), **storage, **options)
            one = SglangServer("sglang", given, tmp_path / "sglang.log")
            stack.enter_context(one.process)
            one.wait_ready()
            return one

        yield node, server


def same(one, other):
    """Whether two answers have equal tokens, and log-probabilities that differ by rounding."""
    equal = one.answer.tokens == other.answer.tokens
    return equal and largest_difference(one.answer, other.answer) < 1e-4


def stored(asked):
    """Return how many tokens of a prompt came from the storage."""
    return asked.tokens.fetched_total


def test_its_own_factory_and_host_pools_get_every_page_back(started, tmp_path):
    node, _ = started
    variables = sglang_environment.variables(tmp_path)
    argv = [sglang_environment.python(), str(SCRIPT), str(model.make("tiny")), node().address]
    done = subprocess.run(
        argv, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout)
    assert found.pop("differences") == []
    assert found.pop("chosen") == ["cpu", "torch_native"]
    assert len(found) == 14  # two interfaces, four layouts of MHA and three of MLA
    assert set(found.values()) == {"equal"}, found


def test_a_context_survives_caches_restarts_damage_and_a_lost_node(started):
    make_node, make_server = started
    node = make_node()
    server = make_server(node)
    cold = server.ask(PROMPT, TOKENS)
    assert cold.tokens.computed == len(PROMPT)
    server.forget()
    warm = server.ask(PROMPT, TOKENS)
    assert stored(warm) == WHOLE
    assert same(warm, cold)

    node.wait_on_disk(WHOLE // PAGE_TOKENS)
    server.process.stop()
    node.restart()
    server = make_server(node)
    again = server.ask(PROMPT, TOKENS)
    assert stored(again) == WHOLE
    assert same(again, cold)

    node.kill()
    damage(node)
    node.start()
    server.forget()
    damaged = server.ask(PROMPT, TOKENS)
    assert stored(damaged) < WHOLE  # the pages before the first damaged one
    assert same(damaged, cold)
    server.forget()
    repaired = server.ask(PROMPT, TOKENS)
    assert stored(repaired) == WHOLE
    assert same(repaired, cold)

    node.kill()
    server.forget()
    alone = server.ask(PROMPT, TOKENS)
    assert stored(alone) == 0
    assert same(alone, cold)


def test_attention_of_the_new_tokens_only_gives_the_same_answers(started):
    make_node, make_server = started
    node = make_node()
    whole = make_server(node)
    expected = whole.ask(PROMPT, TOKENS)
    whole.process.stop()
    server = make_server(node, environment=sglang_environment.NEW_TOKENS_ONLY)
    warm = server.ask(PROMPT, TOKENS)
    assert stored(warm) == WHOLE
    assert same(warm, expected)
    cold = server.ask(PROMPT[::-1], TOKENS)
    server.forget()
    warm = server.ask(PROMPT[::-1], TOKENS)
    assert stored(warm) == WHOLE
    assert same(warm, cold)


def damage(node):
    """Reverse bytes in most pages in the disk tier's file."""
    file = Path(node.address.removeprefix("unix://")).parent / "disk" / "blocks.holdfast"
    with file.open("r+b") as blocks:
        end = file.stat().st_size
        for at in range(1 * MIB, end, 64 * 1024):
            blocks.seek(at)
            piece = blocks.read(4_096)
            blocks.seek(at)
            blocks.write(piece[::-1])


def test_every_kind_that_the_table_calls_cached_has_a_model_here():
    cached = {k for k in cached_models.MODEL_KINDS if k.sglang.startswith(cached_models.YES)}
    assert cached == {cached_models.FULL, *OTHER_MODELS.values()}


@pytest.fixture
def other(tmp_path):
    """Write one of the other models; return its folder, and a prompt of its vocabulary."""

    def written(name):
        small_models.write_model(tmp_path, name)
        for file in model.make("tiny").glob("tokenizer*"):  # only to print what is generated
            shutil.copy(file, tmp_path / name)
        settings = tmp_path / name / "config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | SETTINGS.get(name, {})))
        return tmp_path / name, [10 + token % (small_models.VOCABULARY - 10) for token in PROMPT]

    return written


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_get_their_contexts_back_after_a_restart(started, other, name):
    make_node, make_server = started
    folder, prompt = other(name)
    node = make_node()
    server = make_server(node, folder=folder)
    cold = server.ask(prompt, TOKENS)
    assert stored(cold) == 0
    node.wait_on_disk(WHOLE // PAGE_TOKENS)
    server.process.stop()
    node.restart()
    server = make_server(node, folder=folder)
    warm = server.ask(prompt, TOKENS)
    assert stored(warm) == WHOLE
    assert same(warm, cold)


def test_latents_are_saved_once_for_all_ranks(started, other):
    make_node, make_server = started
    folder, prompt = other("mla")
    node = make_node()
    two = make_server(node, folder=folder, ranks=2)
    cold = two.ask(prompt, TOKENS)
    node.wait_on_disk(WHOLE // PAGE_TOKENS)
    two.forget()
    warm = two.ask(prompt, TOKENS)
    assert stored(warm) == WHOLE
    assert same(warm, cold)
    assert node.blocks_on_disk() == WHOLE // PAGE_TOKENS  # not twice as many
    two.process.stop()
    one = make_server(node, folder=folder)
    alone = one.ask(prompt, TOKENS)
    assert stored(alone) == WHOLE
    assert same(alone, cold)


def test_ranks_share_a_node_and_find_their_own_heads(started):
    make_node, make_server = started
    node = make_node()
    one = make_server(node)
    alone = one.ask(PROMPT, TOKENS)
    one.process.stop()
    two = make_server(node, ranks=2)
    cold = two.ask(PROMPT, TOKENS)
    assert stored(cold) == 0  # pages of one rank are not those of two
    assert same(cold, alone)
    two.forget()
    warm = two.ask(PROMPT, TOKENS)
    assert stored(warm) == WHOLE
    assert same(warm, cold)


def test_transformers_and_sglang_continue_each_others_contexts(started):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    make_node, make_server = started
    node = make_node()
    server = make_server(node, layout="portable", page_tokens=BLOCK_TOKENS)
    whole = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model.make("tiny"), dtype="float32")
    ids, other = torch.tensor([PROMPT]), [(7 * token) % 30_000 + 100 for token in PROMPT]

    def answer(prompt, cache=None):
        given = {"past_key_values": cache} if cache is not None else {}
        tensor = torch.tensor([prompt])
        made = loaded.generate(tensor, max_new_tokens=TOKENS, do_sample=False, **given)
        return tuple(made[0, len(prompt) :].tolist())

    with holdfast.open(node.address, domain="default") as store:
        alone = server.ask(other, TOKENS)  # computed by SGLang, and saved
        assert stored(alone) == 0
        node.wait_on_disk(whole // BLOCK_TOKENS)
        cache = holdfast.transformers.cache(loaded, torch.tensor([other]), store)
        assert cache.prefix.fetched == whole
        assert answer(other, cache) == alone.answer.tokens == answer(other)

        cache = holdfast.transformers.cache(loaded, ids, store)  # computed here, and saved
        own = answer(PROMPT)
        assert answer(PROMPT, cache) == own
    warm = server.ask(PROMPT, TOKENS)
    assert stored(warm) == whole
    assert warm.answer.tokens == own
