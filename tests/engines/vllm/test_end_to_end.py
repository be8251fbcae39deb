"""Real vLLM on the CPU: with Holdfast behind it, every output is what it is without.

In float32 outputs are compared with an engine that has no connector; in bfloat16, where the shape
of a product changes its last bits, with the engine's own local prefix hit, bit for bit.
"""

import contextlib
import random
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from holdfast.limits import MIB
from holdfast.wire.local.messages import Fetch, Release, Reserve
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

BLOCK = 128
TOKENS = 1100  # eight blocks and a bit
HELD = TOKENS // BLOCK * BLOCK
ANSWER = 12
PATIENT_MS = 60_000  # on a busy machine a node may not get a core within the usual 50


def prompt_of(name, tokens=TOKENS):
    words = random.Random(name)
    return [words.randrange(300, 30_000) for _ in range(tokens)]


def transfer_to(address):
    return {
        "kv_connector": "HoldfastConnector",
        "kv_connector_module_path": "holdfast.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cover_deadline_ms": PATIENT_MS}
        | ({"holdfast": address} if address else {}),
    }


TIERS = ("host", "disk", "other")
SOURCES = ("engine", "computed", *TIERS)
TOTAL, FETCHED = "vllm:holdfast_prompt_tokens", "vllm:holdfast_fetched_tokens"

TIE = 2e-3
"""Difference of log probabilities below which the shape of a batch may choose between two tokens.

Measured: 1.4e-5 between shapes on AVX2. Of 256 tokens, the two likeliest differ by 4e-3 at least in
half of all answers, so wrong KV state is hardly ever taken for a tie.
"""


def until(what, within_s=180.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def first_difference(found, right):
    """Return the number of the first token that differs; None if all are equal."""
    pairs = enumerate(zip_longest(found, right))
    return next((number for number, (one, other) in pairs if one != other), None)


class Harness:
    """One node, engines in front of it, and one without a connector that knows what is right."""

    def __init__(self, real, folder):
        self.folder = folder
        self.model = str(make("tiny"))
        # Whatever is held comes back: on a busy machine a short context is quicker computed.
        held = {"plan": "held"}
        self.node = NodeUnderTest(folder / "node", 512 * MIB, 1024 * MIB, settings=held)
        self.between = real.Between(str(folder / "node" / "node.sock"), folder / "between.sock")
        self._real = real
        self._engines = {}
        self._right = {}
        self.start("truth", None)
        self.start("first", self.between.address)

    def start(self, name, address, **options):
        defaults = {
            "model": self.model,
            "dtype": "float32",
            "max_model_len": 4096,
            "kv_cache_memory_bytes": 32 * MIB,
        }
        if address is not None:
            defaults["kv_transfer"] = transfer_to(address)
        engine = self._real.Engine(self.folder / f"{name}.log", **(defaults | options))
        self._engines[name] = engine
        return engine

    def __getitem__(self, name):
        if name == "second" and name not in self._engines:
            self.start("second", self.node.address)
        engine = self._engines[name]
        if not isinstance(engine, tuple):
            self._engines[name] = (engine.wait_ready(),)
        return self._engines[name][0]

    def right(self, prompt, tokens=ANSWER):
        """Return what an engine without a connector answers."""
        (right,) = self.all_right([prompt], tokens)
        return right

    def all_right(self, prompts, tokens):
        """Return the same for several prompts at once."""
        keys = [(tuple(prompt), tokens) for prompt in prompts]
        asked = [
            prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self._right
        ]
        answers = self["truth"].ask(prompts=asked, tokens=tokens) if asked else []
        for prompt, answer in zip(asked, answers, strict=True):
            self._right[tuple(prompt), tokens] = answer["tokens"]
        return [self._right[key] for key in keys]

    def check(self, prompts, answers, tokens):
        """Fail if an answer differs from the right one, other than at a tie of two tokens."""
        rights = self.all_right(prompts, tokens)
        for prompt, answer, right in zip(prompts, answers, rights, strict=True):
            at = first_difference(answer["tokens"], right)
            if at is None:
                continue
            start = [*prompt, *right[:at]]
            (again,) = self["truth"].ask(prompts=[start], tokens=1, logprobs=2)
            likeliest = dict(again["logprobs"][0])
            found = [likeliest.get(right[at], 0.0), likeliest.get(answer["tokens"][at], -9e9)]
            assert found[0] - found[1] < TIE, f"token {at}: {found}, cached {answer['cached']}"

    def ask(self, prompt, name="first", tokens=ANSWER):
        (answer,) = self[name].ask(prompts=[prompt], tokens=tokens)
        return answer

    def blocks(self):
        return self.node.status()["blocks"]

    def counted(self):
        """Return the node's counts of prompt tokens in vLLM's terms."""
        activity = self.node.status()["activity"]
        return {
            "queries": activity["tokens"] - activity["engine_tokens"],
            "hits": sum(activity["loaded_tokens"].values()),
        }

    @contextlib.contextmanager
    def closing(self, low, high=None):
        """Check that the prompt tokens counted meanwhile are from `low` to `high`, by their source.

        The counts of tiers are of KV that was fetched.
        """

        def counts():
            metrics = self["first"].metrics()
            by_source = "vllm:holdfast_prompt_tokens_by_source:"
            found = Counter({name.removeprefix(by_source): n for name, n in metrics.items()})
            return {name: found[name] for name in (*SOURCES, TOTAL, FETCHED)}

        before = counts()
        yield
        after = {name: number - before[name] for name, number in counts().items()}
        assert low <= after[TOTAL] <= (high or low)
        assert sum(after[source] for source in SOURCES) == after[TOTAL]
        assert sum(after[tier] for tier in TIERS) <= after[FETCHED]

    def save(self, prompt, name="first", tokens=ANSWER):
        """Have a context computed and saved, and forgotten by the engine."""
        before = self.blocks()
        answer = self.ask(prompt, name, tokens)
        blocks = (len(prompt) + tokens - 1) // BLOCK
        until(lambda: self.blocks() == before + blocks)
        assert self[name].reset()
        return answer

    def start_node(self):
        """Start the node again, and return when it has found what it can on its disk."""
        self.node.start()
        until(lambda: self.node.status()["recovery_s"] is not None)
        until(self["first"].connected)

    def close(self):
        for name in list(self._engines):
            self[name].close()
        self.node.process.stop()


@pytest.fixture(scope="module")
def harness(real, tmp_path_factory):
    harness = Harness(real, tmp_path_factory.mktemp("vllm"))
    yield harness
    harness.close()


@pytest.fixture(autouse=True)
def passing(harness):
    yield
    harness.between.passes = None
    with contextlib.suppress(AssertionError):
        harness["first"].reset()


def test_a_context_is_loaded_after_the_engine_cache_is_reset(harness):
    prompt = prompt_of("warm")
    cold = harness.save(prompt)
    computed = harness["first"].digests(count=HELD // BLOCK)
    assert (cold["tokens"], cold["cached"]) == (harness.right(prompt), 0)
    warm = harness.ask(prompt)
    assert (warm["tokens"], warm["cached"]) == (harness.right(prompt), HELD)
    # Attention does not see the order of pages: answers alone would not tell if it were wrong.
    assert harness["first"].digests(count=HELD // BLOCK) == computed


def test_bytes_from_the_wrong_place_change_the_answer(harness):
    # The control: were pages not read at all, every other test here would pass too.
    prompt = prompt_of("shifted")
    harness.save(prompt)
    harness["first"].shift(by=128 << 10)
    wrong = harness.ask(prompt)
    harness["first"].shift(by=0)
    assert wrong["cached"] == HELD
    assert wrong["tokens"] != harness.right(prompt)
    with pytest.raises(AssertionError, match="token"):
        harness.check([prompt], [wrong], ANSWER)
    harness["first"].reset()
    assert harness.ask(prompt)["tokens"] == harness.right(prompt)


def test_local_pages_and_loaded_ones_go_together(harness):
    prompt = prompt_of("local and loaded")
    harness.save(prompt)
    computed = harness["first"].digests(count=HELD // BLOCK)
    start = prompt[:300]
    assert harness.ask(start)["tokens"] == harness.right(start)
    answer = harness.ask(prompt)
    assert (answer["tokens"], answer["cached"]) == (harness.right(prompt), HELD)
    assert harness["first"].digests(count=HELD // BLOCK) == computed


def test_an_answer_is_saved_with_its_prompt(harness):
    prompt = prompt_of("answer", 600)
    cold = harness.save(prompt, tokens=200)
    turn = prompt + cold["tokens"] + prompt_of("next turn", 50)
    answer = harness.ask(turn)
    assert cold["tokens"] == harness.right(prompt, 200)
    assert (answer["tokens"], answer["cached"]) == (harness.right(turn), 799 // BLOCK * BLOCK)


def test_prompts_around_block_boundaries_hit_all_their_complete_blocks(harness):
    for tokens in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
        prompt = prompt_of(f"length {tokens}", tokens)
        harness.save(prompt, tokens=2)
        answer = harness.ask(prompt, tokens=2)
        assert answer["tokens"] == harness.right(prompt, 2)
        assert answer["cached"] == (tokens - 1) // BLOCK * BLOCK
        harness["first"].reset()


def test_a_salt_keeps_contexts_apart(harness):
    prompt = prompt_of("salt")
    harness.save(prompt)
    for salt, cached in (("a", 0), ("b", 0), ("a", HELD)):
        answer = harness["first"].ask_salted(prompt=prompt, tokens=ANSWER, salt=salt)
        assert (answer["tokens"], answer["cached"]) == (harness.right(prompt), cached)
        harness["first"].reset()


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_an_aborted_request_leaves_nothing_behind(harness, steps):
    prompt = prompt_of(f"aborted {steps}")
    harness.save(prompt)
    # Slow enough for the abort to come while pages are being loaded.
    harness.between.passes = lambda message: not isinstance(message, Fetch) or not time.sleep(0.1)
    with harness.closing(0, TOKENS):
        left = harness["first"].abort(prompt=prompt, steps=steps)
    assert left == {"left": 0, "usage": 0.0}
    answer = harness.ask(prompt)
    assert (answer["tokens"], answer["cached"]) == (harness.right(prompt), HELD)


def test_blocks_damaged_in_memory_are_recomputed(harness, real):
    prompt = prompt_of("damaged memory")
    harness.save(prompt)
    with real.arena(harness.node) as memory:
        for at in range(0, len(memory), 64 << 10):
            memory[at] ^= 0xFF
            memory[at + 30_000] ^= 0x01
    with harness.closing(TOKENS):
        damaged = harness.ask(prompt)
    assert (damaged["tokens"], damaged["finish"]) == (harness.right(prompt), "length")
    harness["first"].reset()
    until(lambda: harness.ask(prompt)["cached"] == HELD or not harness["first"].reset())
    assert harness.ask(prompt)["tokens"] == harness.right(prompt)


def test_a_lost_message_to_the_node_costs_only_the_hit(harness):
    for kind in (Fetch, Release, Reserve):
        prompt = prompt_of(f"swallowed {kind.__name__}")
        harness.save(prompt)
        harness.between.passes = lambda message, kind=kind: not isinstance(message, kind)
        answer = harness.ask(prompt, tokens=BLOCK)
        harness.check([prompt], [answer], BLOCK)
        assert answer["finish"] == "length"
        harness.between.passes = None
        harness["first"].reset()
        until(harness["first"].connected)
        answer = harness.ask(prompt)
        assert (answer["tokens"], answer["cached"]) == (harness.right(prompt), HELD)


@pytest.mark.parametrize("kind", [Fetch, Release, Reserve])
def test_a_node_killed_during_a_request_costs_only_the_hit(harness, kind):
    prompt = prompt_of(f"killed at {kind.__name__}")
    other = prompt_of(f"new at {kind.__name__}")
    harness.save(prompt)
    harness.node.wait_idle()  # a kill loses what is not yet on the disk

    def passes(message):
        if isinstance(message, kind):
            harness.node.kill()
        return True

    harness.between.passes = passes
    with harness.closing(2 * TOKENS):
        answers = harness["first"].ask(prompts=[prompt, other], tokens=BLOCK)
    harness.check([prompt, other], answers, BLOCK)
    harness.between.passes = None
    harness.start_node()
    harness["first"].reset()
    # A node that has just started may not answer in time on a busy machine.
    until(lambda: harness.ask(prompt)["cached"] == HELD or not harness["first"].reset())
    assert harness.ask(prompt)["tokens"] == harness.right(prompt)


def test_a_second_engine_loads_contexts_saved_by_the_first(harness):
    prompt = prompt_of("shared")
    harness.save(prompt)
    computed = harness["first"].digests(count=HELD // BLOCK)
    answer = harness.ask(prompt, "second")
    assert (answer["tokens"], answer["cached"]) == (harness.right(prompt), HELD)
    assert harness["second"].digests(count=HELD // BLOCK) == computed
    back = prompt_of("and back")
    harness.save(back, "second")
    assert harness.ask(back)["cached"] == HELD


def test_a_connector_reset_excludes_blocks_saved_before_it(harness):
    prompt = prompt_of("reset")
    harness.save(prompt, "second")
    assert harness["second"].reset(connector=True)
    assert harness.save(prompt, "second")["cached"] == 0
    answer = harness.ask(prompt, "second")
    assert (answer["tokens"], answer["cached"]) == (harness.right(prompt), HELD)
    harness["second"].reset()
    assert harness.ask(prompt)["cached"] == HELD  # others go on using what they share


def test_a_context_is_loaded_from_disk_unless_the_disk_is_damaged(harness):
    prompt, other = prompt_of("disk"), prompt_of("damaged disk")
    harness.save(prompt)
    harness.save(other)
    harness.node.wait_idle()
    before = harness["first"].metrics()
    harness.node.kill()
    harness.start_node()
    answer = harness.ask(prompt)
    assert (answer["tokens"], answer["cached"]) == (harness.right(prompt), HELD)
    after = harness["first"].metrics()
    disk = "vllm:prompt_tokens_cached_by_source:disk"
    assert after[disk] >= before.get(disk, 0) + HELD
    harness["first"].reset()

    harness.node.kill()
    blocks = harness.folder / "node" / "disk" / "blocks.holdfast"
    with blocks.open("r+b") as file:
        for at in range(MIB, blocks.stat().st_size, 100_000):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x10]))
    harness.start_node()
    with harness.closing(TOKENS):
        damaged = harness.ask(other)
    assert (damaged["tokens"], damaged["finish"]) == (harness.right(other), "length")
    assert damaged["cached"] < HELD
    harness["first"].reset()
    until(lambda: harness.ask(other)["cached"] == HELD or not harness["first"].reset())
    assert harness.ask(other)["tokens"] == harness.right(other)


def test_chunked_prefill_and_preemption_do_not_change_the_output(harness):
    prompts = [prompt_of(f"preempted {i}", 420) for i in range(5)]
    harness.start("small", harness.node.address, kv_cache_memory_bytes=8 * MIB,
              max_model_len=1024, max_num_batched_tokens=200)  # fmt: skip
    harness["small"]  # once it is ready, other engines' reports have arrived
    before = harness.counted()
    for _ in range(2):
        answers = harness["small"].ask(prompts=prompts, tokens=100)
        assert [answer["tokens"] for answer in answers] == harness.all_right(prompts, 100)
        harness["small"].reset()
    metrics = harness["small"].metrics()
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:external_prefix_cache_hits"] > 0
    # The node counts what vLLM counts. vLLM leaves local hits out of its queries.
    told = {
        "queries": metrics["vllm:external_prefix_cache_queries"],
        "hits": metrics["vllm:external_prefix_cache_hits"],
    }
    until(lambda: {name: n - before[name] for name, n in harness.counted().items()} == told)
    # So do the connector's own counters in vLLM's /metrics.
    by_source = "vllm:holdfast_prompt_tokens_by_source:"
    queries = metrics["vllm:holdfast_prompt_tokens"] - metrics.get(f"{by_source}engine", 0)
    assert {"queries": queries, "hits": metrics[f"{by_source}host"]} == told
    assert metrics["vllm:holdfast_fetched_tokens"] > 0


def test_in_bfloat16_a_load_equals_a_local_hit_bit_for_bit(harness):
    prompt = prompt_of("bfloat16")
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 16 * MIB}
    harness.start("bf16", harness.node.address, **options)
    harness["bf16"].ask(prompts=[prompt], tokens=1)
    (local,) = harness["bf16"].ask(prompts=[prompt], tokens=ANSWER, logprobs=5)
    assert local["cached"] == HELD

    def is_saved():
        harness["bf16"].reset()
        return harness["bf16"].ask(prompts=[prompt], tokens=1)[0]["cached"] == HELD

    until(is_saved)
    harness["bf16"].reset()
    (loaded,) = harness["bf16"].ask(prompts=[prompt], tokens=ANSWER, logprobs=5)
    assert loaded == local
    harness.start("bf16 again", harness.node.address, **options)
    (restarted,) = harness["bf16 again"].ask(prompts=[prompt], tokens=ANSWER, logprobs=5)
    assert restarted == local


def test_an_engine_without_a_node_address_starts_a_private_node(harness):
    prompt = prompt_of("private")
    engine = harness.start("private", "", block_size=32)
    cold = harness.ask(prompt, "private")
    assert (cold["tokens"], cold["cached"]) == (harness.right(prompt), 0)
    assert harness["private"].reset()

    def warm():
        answer = harness.ask(prompt, "private")
        assert answer["tokens"] == harness.right(prompt)
        return harness["private"].reset() and answer["cached"] == HELD

    until(warm)
    log = engine.log.read_text()
    address = log.split("Holdfast at unix://")[1].split(":")[0]
    del harness._engines["private"]
    engine.close()
    assert not Path(address).parent.exists()


def test_a_replica_starts_a_new_private_node_when_the_one_that_started_the_node_has_ended(harness):
    prompt = prompt_of("replicas")
    transfer = transfer_to("") | {"engine_id": "replicas"}

    def loads(name):
        answer = harness.ask(prompt, name)
        assert answer["tokens"] == harness.right(prompt)
        return harness[name].reset() and answer["cached"] == HELD

    first = harness.start("starter", "", kv_transfer=transfer)
    until(lambda: loads("starter"))
    harness.start("other", "", kv_transfer=transfer)
    assert loads("other")
    del harness._engines["starter"]
    first.close()
    assert not loads("other"), "the blocks ended with the node"
    until(lambda: loads("other"))


def test_a_new_request_beside_another_is_scheduled_in_the_step_it_arrives_in(harness):
    # Alone it would be, too: the answer of the node must not cost it a whole step.
    assert (
        harness["first"].join(running=prompt_of("running", 300), new=prompt_of("new", 300)) == 300
    )


def test_a_request_for_logprobs_of_its_prompt_is_declined_and_not_counted_as_computed(harness):
    prompt = prompt_of("prompt logprobs", 2 * BLOCK)
    declined = "vllm:holdfast_declined_requests"
    before = harness["first"].metrics().get(declined, 0)
    with harness.closing(0):
        (answer,) = harness["first"].ask(prompts=[prompt], tokens=ANSWER, prompt_logprobs=1)
    assert answer["tokens"] == harness.right(prompt)
    assert harness["first"].metrics()[declined] == before + 1


def test_hints_of_a_request_reach_the_node(harness):
    prompt = prompt_of("hinted")
    for hint, sessions in (({"returns_in_s": 30, "pin_s": 600}, 1), ({"closed": True}, 0)):
        extra = {"kv_transfer_params": {"holdfast": {"session": "chat-7", **hint}}}
        (answer,) = harness["first"].ask(prompts=[prompt], tokens=ANSWER, extra_args=extra)
        assert answer["tokens"] == harness.right(prompt)
        until(lambda wanted=sessions: harness.node.status()["hints"]["sessions"] == wanted)
        until(lambda: harness.node.status()["hints"]["pinned_bytes"] > 0)
