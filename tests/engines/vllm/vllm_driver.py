"""A vLLM engine in a process of its own, that calls the methods it is told to."""

import contextlib
import hashlib
import os
import time


class Driver:
    def __init__(self, options):
        from vllm import LLM
        from vllm.config import ECTransferConfig, KVTransferConfig
        from vllm.model_executor.models import registry

        transfer = options.pop("kv_transfer", None)
        encoders = options.pop("ec_transfer", None)
        # vLLM inspects a model in a new process, which imports everything again.
        registry._run_in_subprocess = lambda inspect: inspect()
        self.llm = LLM(
            **options,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            ec_transfer_config=ECTransferConfig(**encoders) if encoders else None,
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.pages = []
        manager = self.core.scheduler.kv_cache_manager
        free = manager.free

        def note_and_free(request):
            self.pages = manager.get_block_ids(request.request_id)[0]
            free(request)

        manager.free = note_and_free

    def ask(self, prompts, tokens, logprobs=None, **settings):
        params = greedy(tokens, logprobs=logprobs, **settings)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [self.answer(output) for output in outputs]

    def ask_several(self, prompt, tokens, count, seed):
        """Sample several answers to one prompt; return their tokens, and the cached tokens."""
        from vllm import SamplingParams

        params = SamplingParams(n=count, seed=seed, max_tokens=tokens, ignore_eos=True)
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return [list(each.token_ids) for each in output.outputs], output.num_cached_tokens

    def ask_prompt_logprobs(self, prompt, tokens):
        """Return the log-probability of each token of a prompt, and the cached tokens."""
        params = greedy(tokens, prompt_logprobs=0)
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        given = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        return [step[token].logprob for token, step in given], output.num_cached_tokens

    def ask_adapted(self, prompt, tokens, adapter):
        """Ask with the LoRA adapter in a folder; None: without one."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(adapter, 1 + hash(adapter) % 1000, adapter) if adapter else None
        inputs = [{"prompt_token_ids": prompt}]
        params = greedy(tokens, logprobs=5)
        (output,) = self.llm.generate(inputs, params, use_tqdm=False, lora_request=request)
        return self.answer(output)

    def ask_picture(self, prompt, seed, tokens):
        """Ask about a picture of noise."""
        import numpy as np
        from PIL import Image

        noise = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), np.uint8)
        picture = {"image": Image.fromarray(noise)}
        inputs = {"prompt_token_ids": prompt, "multi_modal_data": picture}
        (output,) = self.llm.generate([inputs], greedy(tokens, logprobs=5), use_tqdm=False)
        return self.answer(output)

    def sleep_and_wake(self, level):
        """Sleep and wake up; on a CPU vLLM resets its caches, and keeps its memory."""
        self.llm.sleep(level=level)
        self.llm.wake_up()

    def reload_weights(self, folder):
        """Replace the weights in place by those of another folder."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def answer(self, output):
        (choice,) = output.outputs
        steps = [
            sorted((token, value.logprob) for token, value in step.items())
            for step in choice.logprobs or []
        ]
        return {
            "tokens": list(choice.token_ids),
            "logprobs": steps,
            "cached": output.num_cached_tokens,
            "finish": choice.finish_reason,
            "transferred": output.kv_transfer_params,
        }

    def ask_sound(self, prompt, seed, tokens, name=None):
        """Ask about a second of noise; `name` is what a client calls it."""
        import numpy as np

        sound = np.random.default_rng(seed).normal(size=16_000).astype(np.float32)
        inputs = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (sound, 16_000)}}
        if name:
            inputs["multi_modal_uuids"] = {"audio": [name]}
        (output,) = self.llm.generate([inputs], greedy(tokens, logprobs=5), use_tqdm=False)
        return self.answer(output)

    def count_encodings(self):
        """Count from now on how often the model encodes an image or a sound."""
        runner = self.core.model_executor.driver_worker.worker.model_runner
        model, self.encodings = runner.get_model(), 0
        encode = model.embed_multimodal

        def count_and_encode(**inputs):
            self.encodings += 1
            return encode(**inputs)

        model.embed_multimodal = count_and_encode

    def encoded(self):
        return self.encodings

    def forget_media(self):
        """Empty the engine's own caches of encoder outputs and KV."""
        self.llm.reset_prefix_cache()
        self.engine.reset_encoder_cache()

    def ask_salted(self, prompt, tokens, salt):
        params = greedy(tokens)
        inputs = {"prompt_token_ids": prompt, "cache_salt": salt}
        (output,) = self.llm.generate(inputs, params, use_tqdm=False)
        return self.answer(output)

    def abort(self, prompt, steps):
        """Run a request for some steps, abort it, and step until nothing of it is left."""
        params = greedy(50)
        self.engine.add_request("aborted", {"prompt_token_ids": prompt}, params)
        for _ in range(steps):
            self.engine.step()
        self.engine.abort_request(["aborted"])
        return self.drain()

    def drain(self):
        """Step until nothing is left to do; return what is left of requests and pages."""
        end_s = time.monotonic() + 120
        while self.core.scheduler.has_requests() and time.monotonic() < end_s:
            self.engine.step()
        return {"left": len(self.core.scheduler.requests), "usage": self.usage()}

    def request(self, name):
        """Return a live request; vLLM appends to the name that it was added with."""
        requests = self.core.scheduler.requests.items()
        (request,) = [request for full, request in requests if full.startswith(name)]
        return request

    def join(self, running, new):
        """Add a request while another one runs; return the new one's tokens after one step."""
        self.engine.add_request("running", {"prompt_token_ids": running}, greedy(50))
        while self.request("running").num_output_tokens < 2:
            self.engine.step()
        self.engine.add_request("new", {"prompt_token_ids": new}, greedy(50))
        self.engine.step()
        tokens = self.request("new").num_computed_tokens
        self.engine.abort_request(["running", "new"])
        self.drain()
        return tokens

    def queue(self, running, new, tokens):
        """Add a request while another one generates so many tokens; step until both have ended."""
        self.engine.add_request("running", {"prompt_token_ids": running}, greedy(tokens))
        while self.request("running").num_output_tokens < 2:
            self.engine.step()
        self.engine.add_request("new", {"prompt_token_ids": new}, greedy(2))
        return self.drain()

    def add(self, prompts, tokens):
        """Add requests; `abort_added` ends them."""
        self.added = [f"added {at}" for at in range(len(prompts))]
        for name, prompt in zip(self.added, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, greedy(tokens))

    def step(self, steps):
        """Run some steps, or fewer if nothing is left to do."""
        for _ in range(steps):
            if self.core.scheduler.has_requests():
                self.engine.step()

    def step_until_loading(self):
        """Step until a request waits for a load that has begun; return whether one does."""
        from vllm.v1.request import RequestStatus

        end_s = time.monotonic() + 60
        while time.monotonic() < end_s and self.core.scheduler.has_requests():
            self.engine.step()
            states = [request.status for request in self.core.scheduler.requests.values()]
            if RequestStatus.WAITING_FOR_REMOTE_KVS in states:
                return True
        return False

    def abort_added(self):
        self.engine.abort_request(self.added)

    def reset_running(self):
        """Reset vLLM's cache and the connector's, as after new weights, while requests run."""
        return self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def usage(self):
        return self.core.scheduler.get_kv_cache_usage()

    def reset(self, connector=False):
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def digests(self, count, group=0):
        """Return a digest of a KV group's first pages of the last request, in their order."""
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        layers = get_kv_transfer_group()._worker._devices[group]._keep
        return [
            hashlib.sha256(
                b"".join(layer[page].view(torch.uint8).numpy().tobytes() for layer in layers)
            ).hexdigest()
            for page in self.pages[:count]
        ]

    def connected(self):
        """Tell whether both sides have a session with the node."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        links = [
            get_kv_transfer_group()._worker._connection,
            *self.core.scheduler.connector._scheduler._connections,
        ]
        return all(link.client() for link in links)

    def shift(self, by):
        """Let loads read so many bytes too far: what a test must be able to see."""
        from holdfast.client import loader

        original = getattr(loader, "original_moves_of", loader.moves_of)
        loader.original_moves_of = original

        def shifted(*arguments):
            return [move._replace(payload=move.payload + by) for move in original(*arguments)]

        loader.moves_of = shifted

    def hit_unit(self):
        """Return the tokens of which vLLM's own hits are a multiple."""
        return self.core.scheduler.kv_cache_config.cache_hit_alignment_tokens

    def leave_out(self, group):
        """Let loads put the blocks of one KV group nowhere; None: no group."""
        from holdfast.client import loader

        original = getattr(loader, "original_moves_of", loader.moves_of)
        loader.original_moves_of = original

        def some(load, places):
            moves = original(load, places)
            # vLLM's page 0 is of no request.
            return [
                move._replace(pages=[0] * len(move.pages)) if load.group == group else move
                for move in moves
            ]

        loader.moves_of = some

    def fail_loads(self):
        """Let every load end without its blocks."""
        from holdfast.client import loader
        from holdfast.errors import NodeGoneError

        def fail(*_):
            raise NodeGoneError("planted by a test")

        loader.Loader._fetch = fail

    def durable_blocks(self):
        """Return the blocks of durable requests by outcome: `kept`, `late`."""
        name = "vllm:holdfast_durable_blocks"
        metrics = [metric for metric in self.llm.get_metrics() if metric.name == name]
        return {metric.labels["outcome"]: metric.value for metric in metrics}

    def metrics(self):
        """Return vLLM's counters by name, summed over labels, and cached tokens by source."""
        found = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                source = metric.labels.get("source")
                name = f"{metric.name}:{source}" if source else metric.name
                found[name] = found.get(name, 0) + value
        return found


def greedy(tokens, **settings):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **settings)


def run(channel, log, options):
    """Be an engine until the other end of the channel is closed."""
    from holdfast.client import answer_wait, direct_saves, rank_transfers

    with log.open("ab") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    # A machine that runs tests is busy: what is not about deadlines must not fail for them.
    rank_transfers.DEADLINE_MIN_S = direct_saves.RESERVE_S = 3.0
    answer_wait.STEP_MAX_S, answer_wait.STEP_SHARE = 3.0, 1_000.0
    if "ec_transfer" in options:
        from holdfast.engines.vllm.encoder import connector

        connector.WAIT_S = 60.0
    driver = Driver(options)
    channel.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = channel.recv()
            channel.send(getattr(driver, name)(**arguments))
    driver.engine.engine_core.shutdown()
