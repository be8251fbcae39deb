"""A vLLM engine with portable blocks and the same model in transformers, at one node."""

import random
import time

import torch
import transformers

import holdfast
from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest

BLOCK, ANSWER = 128, 4


def words(seed, tokens, vocabulary):
    return random.Random(seed).choices(range(10, vocabulary), k=tokens)


def until(what, within_s=120.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def difference(found, right):
    """Return the largest difference of log-probabilities; it may be no number."""
    return max(abs(value - float(right[token])) for token, value in found.items())


class PortablePairs:
    """A node, and a folder of models that `write(folder)` has written, in float32."""

    def __init__(self, real, folder, write):
        self.real, self.folder = real, folder
        self.node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings={"plan": "held"})
        # In another process: vLLM refuses weights that are younger than its own process.
        writing = real.forks().Process(target=write, args=(folder,))
        writing.start()
        writing.join()
        assert writing.exitcode == 0

    def start(self, name, digest=""):
        """Start both with a model; `digest`: what their user calls its weights."""
        return PortablePair(self, name, digest)

    def engine(self, name, digest):
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "holdfast": self.node.address, "cover_deadline_ms": 60_000, "layout": "portable",
                **({"model_digest": digest} if digest else {}),
            },
        }  # fmt: skip
        return self.real.Engine(
            self.folder / f"{name}.log", model=str(self.folder / name), dtype="float32",
            kv_transfer=transfer, max_model_len=2048, kv_cache_memory_bytes=32 * MIB,
            skip_tokenizer_init=True,
        )  # fmt: skip


class TransformersSide:
    """A model in transformers, in float32, with the store of a node.

    `digest`: what its user calls its weights; empty: they are compared with the files.
    """

    def __init__(self, folder, address, digest=""):
        self.digest = digest
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = loaded.eval()
        self.store = holdfast.open(address, domain="default")

    def close(self):
        self.store.close()

    def cache(self, prompt):
        return holdfast.transformers.cache(
            self.model, [prompt], self.store, block_tokens=BLOCK, model_digest=self.digest
        )

    def after(self, prompt, cache=None):
        """Return the log-probabilities after a prompt, part of it in a cache."""
        held = cache.get_seq_length() if cache is not None else 0
        ids = torch.tensor([prompt[held:]])
        with torch.no_grad():
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits[0, -1]
        return torch.log_softmax(logits, -1)


class PortablePair(TransformersSide):
    """vLLM and transformers with one model."""

    def __init__(self, pairs, name, digest):
        self.node = pairs.node
        self.engine = pairs.engine(name, digest)
        super().__init__(pairs.folder / name, pairs.node.address, digest)
        self.engine.wait_ready()

    def close(self):
        self.engine.close()
        super().close()

    def ask(self, prompt):
        """Return how many tokens vLLM loaded, and the log-probabilities of its first token."""
        settings = {"tokens": ANSWER, "logprobs": 5, "detokenize": False}
        (answer,) = self.engine.ask(prompts=[prompt], **settings)
        return answer["cached"], dict(answer["logprobs"][0])

    def save(self, prompt, blocks):
        """Have vLLM compute a prompt, and wait until its new blocks are saved."""
        before = self.node.status()["blocks"]
        found = self.ask(prompt)
        until(lambda: self.node.status()["blocks"] == before + blocks)
        return found
