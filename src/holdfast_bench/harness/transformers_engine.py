"""A model in Hugging Face transformers on this machine, asked as a vLLM server is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import holdfast
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness.completion import (
    TOP_LOGPROBS,
    CompletionAnswer,
    MeasuredCompletion,
    TokenSources,
)


class TransformersEngine:
    """A model of a folder, in this process; `store` None: it computes everything itself."""

    def __init__(self, folder: Path, dtype: str, store: Any = None) -> None:  # noqa: ANN401  # either kind of store
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        more = {} if dtype == "auto" else {"dtype": getattr(torch, dtype)}
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, **more).eval()
        self._store = store

    def ask(self, prompt: Sequence[int], max_tokens: int) -> MeasuredCompletion:
        """Generate a greedy completion; the time to the first token begins before the lookup."""
        import torch

        ids = torch.tensor([list(prompt)])
        first = FirstToken()
        cache, sources = None, TokenSources(len(prompt), 0, {})
        if self._store is not None:
            cache = holdfast.transformers.cache(self.model, ids, self._store)
            found = cache.prefix
            tiers = {tier: blocks * BLOCK_TOKENS for tier, blocks in found.sources.items()}
            sources = TokenSources(len(prompt) - found.fetched, 0, tiers)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            streamer=first,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = tuple(out.sequences[0, len(prompt) :].tolist())
        steps = [_best(logits[0]) for logits in out.logits]
        if self._store is not None:
            holdfast.transformers.save(self.model, out.sequences, cache, self._store)
        return MeasuredCompletion(CompletionAnswer(tokens, tuple(steps), first.after_s), sources)


class FirstToken:
    """A streamer of `generate` that notes when the first token came, in seconds."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._calls = 0
        self.after_s = 0.0

    def put(self, value: object) -> None:
        """Note the time of the second call; the first brings the prompt."""
        del value
        self._calls += 1
        if self._calls == 2:  # noqa: PLR2004  # see above
            self.after_s = time.perf_counter() - self._start_s

    def end(self) -> None:
        """Do nothing at the end of the answer."""


def largest_difference(one: CompletionAnswer, other: CompletionAnswer) -> float:
    """Return how far the log-probabilities of two answers are apart, while their tokens agree.

    Compared are tokens that are among the best of both.
    """
    largest = 0.0
    for step, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        known = dict(theirs)
        shared = [abs(value - known[name]) for name, value in ours if name in known]
        largest = max([largest, *shared])
        if one.tokens[step] != other.tokens[step]:
            break
    return largest


def _best(logits: Any) -> tuple[tuple[str, float], ...]:  # noqa: ANN401  # a tensor
    """Return the best tokens of a step as vLLM's server names them, with log-probabilities."""
    values, tokens = logits.float().log_softmax(-1).topk(TOP_LOGPROBS)
    named = zip(tokens.tolist(), values.tolist(), strict=True)
    return tuple(sorted((f"token_id:{token}", value) for token, value in named))
