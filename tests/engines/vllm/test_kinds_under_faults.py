"""Real vLLM with full attention, windows and recurrent state: crowds, aborts, resets, stops.

A model answers as before, by log-probabilities, all pages come back, and counters stay sums.
"""

import random
import threading
import time

import pytest
import yaml

pytest.importorskip("vllm")

from small_models import VOCABULARY, write_models

from holdfast.limits import MIB
from holdfast.wire.local.messages import Cover, Fetch, Prestage, Reserve
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.pause import pause, resume

pytestmark = pytest.mark.vllm

BLOCK, ANSWER = 128, 4
PREFIX, TAIL = 8 * BLOCK, 20
FETCHED = "vllm:holdfast_fetched_tokens"
CONTEXTS, CONTEXT = 5, 600
MAX_TOKENS = 1920
TOGETHER, LONG = 8, 100
"""Requests that run at once, and the tokens of an answer for which another one waits."""
NEAR = 1e-4
"""Largest difference of log-probabilities; batches of other shapes change the last bits."""

UNEQUAL_IN_BATCHES = ("lfm2",)
"""Kinds that vLLM 0.32 answers otherwise in a batch than alone, also without a connector."""

MEMORY = {"llama": 8 * MIB, "gemma3": 8 * MIB, "lfm2": 4 * MIB}
"""Memory for the pages of one request of full size, or of few others at once."""


def words(name, count):
    return random.Random(name).choices(range(10, VOCABULARY), k=count)


def until(what, within_s=180.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture(scope="module")
def models(real, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    # In another process: vLLM refuses weights that are younger than its own process.
    writing = real.forks().Process(target=write_models, args=(folder,))
    writing.start()
    writing.join()
    assert writing.exitcode == 0
    return folder


class Scene:
    """A node, an engine of one kind behind it, and what stands between them."""

    def __init__(self, real, node, folder, models, kind):
        self.kind, self.node = kind, node
        self.between = real.Between(str(folder / "node" / "node.sock"), folder / "between.sock")
        options = {
            "listen": self.between.address,
            "tiers": [{"kind": "host", "capacity": 16 * MIB}],
            # A busy machine may need long for a load: no test here is about deadlines.
            "engine": {"deadline_s": 60.0},
        }
        (folder / "engine.yaml").write_text(yaml.safe_dump(options))
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "holdfast": str(folder / "engine.yaml"), "cover_deadline_ms": 60_000,
            },
        }  # fmt: skip
        self.engine = real.Engine(
            folder / "engine.log", model=str(models / kind), kv_transfer=transfer,
            dtype="float32", max_model_len=MAX_TOKENS, max_num_batched_tokens=256,
            max_num_seqs=TOGETHER, kv_cache_memory_bytes=MEMORY[kind], skip_tokenizer_init=True,
        ).wait_ready()  # fmt: skip

    def ask(self, prompts, tokens=ANSWER):
        return self.engine.ask(prompts=prompts, tokens=tokens, logprobs=3, detokenize=False)

    def save(self, prompts, tokens=ANSWER):
        """Have contexts computed and saved, and forgotten by the engine; return the answers."""
        answers = [self.ask([prompt], tokens)[0] for prompt in prompts]
        for prompt in prompts:
            self.wait_saved(prompt)
        return answers

    def wait_saved(self, prompt):
        """Wait until the engine finds a context in the store, and let it forget it."""

        def found():
            self.drain()
            assert self.engine.reset()
            return self.ask([prompt])[0]["cached"] == len(prompt) // BLOCK * BLOCK

        until(found)
        self.drain()
        assert self.engine.reset()

    def leave_on_disk(self):
        """Let neither the engine nor the node have anything in memory."""
        self.node.wait_idle()
        self.node.restart()
        self.node.wait_recovered()
        until(self.engine.connected)
        assert self.engine.reset()

    def drain(self):
        assert self.engine.drain() == {"left": 0, "usage": 0.0}

    def counts(self):
        return self.engine.metrics()

    def check_full_size(self):
        """Run a request that needs all pages."""
        assert self.engine.reset()
        [answer] = self.ask([words("full size", MAX_TOKENS - ANSWER)])
        assert answer["finish"] == "length"
        self.drain()


@pytest.fixture(
    scope="module", params=["llama", "gemma3", pytest.param("lfm2", marks=pytest.mark.soak)]
)
def scene(real, models, request, tmp_path_factory):
    folder, settings = tmp_path_factory.mktemp("scene"), {"plan": "held"}
    with NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings=settings) as node:
        scene = Scene(real, node, folder, models, request.param)
        yield scene
        scene.engine.close()


@pytest.fixture(autouse=True)
def fresh(scene):
    yield
    scene.between.passes = None
    until(scene.engine.connected)
    scene.engine.drain()
    scene.engine.reset()


def check_equal(found, right):
    assert found["tokens"] == right["tokens"]
    for step, expected in zip(found["logprobs"], right["logprobs"], strict=True):
        assert dict(step) == pytest.approx(dict(expected), abs=NEAR)


@pytest.mark.parametrize("size", [16, pytest.param(50, marks=pytest.mark.soak)])
def test_a_crowd_loads_its_prefix_once(scene, size):
    prefix = words(f"crowd of {size}", PREFIX)
    crowd = [prefix + words(f"tail {at}", TAIL) for at in range(size)]
    cold = scene.save(crowd[:1])[0]
    before = scene.counts()
    answers = scene.ask(crowd)
    after = scene.counts()
    assert [answer["cached"] for answer in answers] == [PREFIX] * size
    assert after[FETCHED] - before.get(FETCHED, 0) == PREFIX
    if scene.kind in UNEQUAL_IN_BATCHES:
        for answer, own in zip(answers, scene.ask(crowd), strict=True):  # behind vLLM's own cache
            check_equal(answer, own)
        return
    check_equal(answers[0], cold)
    assert scene.engine.reset()
    [last] = scene.ask(crowd[-1:])  # loaded for itself
    check_equal(answers[-1], last)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_after_aborts_in_the_middle_of_loads_all_pages_are_free(scene, rounds):
    prompts = [words(f"context {at}", CONTEXT) for at in range(CONTEXTS)]
    cold = scene.save(prompts)
    goes_on = threading.Event()
    scene.between.passes = lambda message: not isinstance(message, Fetch) or goes_on.wait(60)
    for _ in range(rounds):
        assert scene.engine.reset()
        goes_on.clear()
        scene.engine.add(prompts=prompts, tokens=50)
        assert scene.engine.step_until_loading()
        scene.engine.abort_added()
        goes_on.set()
        scene.drain()
    scene.check_full_size()
    assert scene.engine.reset()
    for prompt, right in zip(prompts, cold, strict=True):
        [answer] = scene.ask([prompt])
        assert answer["cached"] == CONTEXT // BLOCK * BLOCK
        check_equal(answer, right)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_after_aborts_in_the_middle_of_saves_all_pages_are_free(scene, rounds):
    for number in range(rounds):
        prompts = [words(f"saved {rounds} {number} {at}", CONTEXT) for at in range(CONTEXTS)]
        scene.engine.add(prompts=prompts, tokens=50)
        scene.engine.step(steps=1 + number)
        scene.engine.abort_added()
        scene.drain()
    scene.check_full_size()


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_in_a_storm_of_preemptions_counters_stay_sums(scene, rounds):
    by_source = "vllm:holdfast_prompt_tokens_by_source:"
    total, preemptions = "vllm:holdfast_prompt_tokens", "vllm:num_preemptions"
    before, prompts = scene.counts(), 0
    for number in range(rounds):
        storm = [words(f"storm {number % 2} {at}", CONTEXT) for at in range(8)]
        for answer in scene.ask(storm, tokens=2 * BLOCK):
            assert answer["finish"] == "length"
        prompts += len(storm)
        scene.drain()
        assert scene.engine.reset()
    after = scene.counts()
    assert after[preemptions] > before.get(preemptions, 0)
    found = {name: after[name] - before.get(name, 0) for name in after}
    assert found[total] == prompts * CONTEXT
    assert sum(n for name, n in found.items() if name.startswith(by_source)) == found[total]
    scene.check_full_size()


def test_what_is_computed_before_a_reset_is_not_found_after_it(scene):
    prompt, running = words("reset", CONTEXT), words("runs at the reset", CONTEXT)
    [cold] = scene.save([prompt])
    scene.engine.add(prompts=[running], tokens=ANSWER)
    scene.engine.step(steps=2)  # a save is under way
    assert scene.engine.reset_running()
    scene.drain()
    assert scene.engine.reset()
    for again in (prompt, running):
        [answer] = scene.ask([again])
        assert answer["cached"] == 0
        scene.wait_saved(again)
    [answer] = scene.ask([prompt])
    check_equal(answer, cold)


class StopAt:
    """Stops the node at the first message of a kind, for some seconds."""

    def __init__(self, scene, kind, stopped_s):
        self._scene, self._kind = scene, kind
        self._stopped = threading.Event()
        self._timer = threading.Timer(stopped_s, resume, (scene.node.process.pid,))
        scene.between.passes = self._passes

    def _passes(self, message):
        if isinstance(message, self._kind) and not self._stopped.is_set():
            self._stopped.set()
            pause(self._scene.node.process.pid)
            self._timer.start()
        return True

    def wait_over(self):
        """Return when the node goes on, and the engine has it again and nothing left to do."""
        assert self._stopped.is_set()
        self._timer.join()
        self._scene.between.passes = None
        until(self._scene.engine.connected)
        self._scene.drain()


def check_hits_again(scene, prompt, right, tokens=ANSWER):
    """Check that a prompt is loaded at last, always with the same answer."""

    def hits():
        if not scene.engine.reset():  # pages may still be saved from
            return False
        [answer] = scene.ask([prompt], tokens)
        check_equal(answer, right)
        return answer["cached"] == CONTEXT // BLOCK * BLOCK

    until(hits)
    scene.check_full_size()


STOPS = [0.5, pytest.param(10.0, marks=pytest.mark.soak)]


@pytest.mark.parametrize("stopped_s", STOPS)
@pytest.mark.parametrize("kind", [Cover, Fetch, Reserve], ids=["lookup", "load", "save"])
def test_a_node_that_stops_costs_only_the_hit(scene, kind, stopped_s):
    prompt = words(f"stopped {kind.__name__}", CONTEXT)
    new = words(f"new {kind.__name__} {stopped_s}", CONTEXT)
    [cold] = scene.save([prompt])
    stop = StopAt(scene, kind, stopped_s)
    for answer, right in zip(scene.ask([prompt, new]), (cold, None), strict=True):
        assert answer["finish"] == "length"
        if right and scene.kind not in UNEQUAL_IN_BATCHES:
            check_equal(answer, right)
    stop.wait_over()
    check_hits_again(scene, prompt, cold)


@pytest.mark.parametrize("stopped_s", STOPS)
def test_a_node_that_stops_when_it_is_told_of_a_waiting_request_costs_only_the_hit(
    scene, stopped_s
):
    prompt = words(f"waits {stopped_s}", CONTEXT)
    [cold] = scene.save([prompt], LONG)
    scene.leave_on_disk()
    crowd = [words(f"runs {stopped_s} {at}", TAIL) for at in range(TOGETHER)]
    stop = StopAt(scene, Prestage, stopped_s)
    *_, last = scene.ask([*crowd, prompt], LONG)
    assert last["finish"] == "length"
    if scene.kind not in UNEQUAL_IN_BATCHES:
        check_equal(last, cold)
    stop.wait_over()
    check_hits_again(scene, prompt, cold, LONG)
