"""The pure ledger of prompt tokens: each token of each prompt is counted once, by its source.

A token is counted when its KV state exists: when the engine schedules its computation, or when a
step uses KV that the engine had or that a load brought. So a failed load, an abort and a node that
is away count what happened and not what was planned. The first source of a token stays its source:
after a preemption the same tokens are loaded or computed again, and are not counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakValueDictionary

OTHER = "other"
"""Source of loaded tokens whose tier is not known."""


class CountedPrompt(NamedTuple):
    """A prompt's tokens by source; `computed` is the rest of `tokens`.

    `tokens`: all tokens of the prompt, or of an aborted one those that have KV state. `engine`: in
    the engine's own prefix cache, or loaded by another connector of it. `loaded`: by tier.
    """

    tokens: int
    engine: int
    loaded: Mapping[str, int]

    @property
    def computed(self) -> int:
        return self.tokens - self.engine - sum(self.loaded.values())


class _OpenPrompt:
    """A prompt that is not counted to its end. `counted`: its leading tokens that are.

    `load_start`: first token of the last load, -1: none. `landed`: verified tokens of that load by
    tier; None until it ends. `member`: the member that reports the prompt, -1: not known.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.counted = self.engine = 0
        self.loaded = Counter[str]()
        self.load_start = -1
        self.landed: Mapping[str, int] | None = None
        self.member = -1


class PromptLedger:
    """Counts the prompts of one engine. Members are its connectors, if it has several.

    All members tell the ledger what they see of a request, and each prompt is counted once, by the
    member that loaded a part of it, else by the first member that had a node at its arrival.
    """

    def __init__(self) -> None:
        self._live = set[str]()
        self._open: dict[str, _OpenPrompt] = {}
        self._counted: list[list[CountedPrompt]] = []

    def join(self) -> int:
        """Add a member; return its number."""
        self._counted.append([])
        return len(self._counted) - 1

    def arrived(self, request: str) -> bool:
        """Note a request; return whether this member is the first that notes it."""
        is_first = request not in self._live
        self._live.add(request)
        return is_first

    def opened(self, member: int, request: str, tokens: int, *, connected: bool) -> None:
        """Note that this request's prompt is to be counted; `connected`: the member has a node."""
        prompt = self._open.setdefault(request, _OpenPrompt(tokens))
        if prompt.member < 0 and connected:
            prompt.member = member

    def __contains__(self, request: object) -> bool:
        """Return whether tokens of this request's prompt are still to be counted."""
        return request in self._open

    def restarted(self, request: str) -> None:
        """Note that the engine decides again what to load; no earlier load counts any more."""
        if prompt := self._open.get(request):
            prompt.load_start, prompt.landed = -1, None

    def loading(self, member: int, request: str, start: int) -> None:
        """Note that a member begins to load the tokens from `start` on."""
        if prompt := self._open.get(request):
            prompt.load_start, prompt.landed, prompt.member = start, None, member

    def landed(self, request: str, tokens: Mapping[str, int]) -> None:
        """Note the verified tokens of a load by tier; of several ranks the fewest count."""
        prompt = self._open.get(request)
        if prompt is None or prompt.load_start < 0:
            return
        if prompt.landed is None or sum(tokens.values()) < sum(prompt.landed.values()):
            prompt.landed = tokens

    def scheduled(self, request: str, context: int, new: int) -> None:
        """Count the tokens of a step: it computes `new` tokens after `context` tokens with KV."""
        prompt = self._open.get(request)
        if prompt is None:
            return
        before, stop = prompt.counted, min(context + new, prompt.tokens)
        if stop > before:
            present = min(context, stop)
            load_start = present if prompt.load_start < 0 else min(prompt.load_start, present)
            prompt.engine += max(load_start - before, 0)
            loaded = present - max(load_start, before)
            if loaded > 0:
                prompt.loaded.update(by_tier(loaded, prompt.landed or {}))
            prompt.counted = stop
        if prompt.counted == prompt.tokens:
            self._close(request)

    def finished(self, request: str) -> None:
        """Note the end of a request. What was not computed until then is not counted."""
        self._live.discard(request)
        self._close(request)

    def take(self, member: int) -> list[CountedPrompt]:
        """Return the prompts that this member reports, each once."""
        taken, self._counted[member] = self._counted[member], []
        return taken

    def _close(self, request: str) -> None:
        prompt = self._open.pop(request, None)
        if prompt is not None and prompt.counted:
            counted = CountedPrompt(prompt.counted, prompt.engine, dict(prompt.loaded))
            self._counted[max(prompt.member, 0)].append(counted)


def by_tier(tokens: int, held: Mapping[str, int]) -> dict[str, int]:
    """Split loaded tokens by tier; `held` are the tokens of whole blocks from each tier."""
    left, split = tokens, {}
    # The largest tier takes the remainder: local hits and the last token shift the counts.
    for name, number in sorted(held.items(), key=lambda item: item[1]):
        split[name] = min(left, number)
        left -= split[name]
    if left:
        name = max(held, key=lambda name: held[name], default=OTHER)
        split[name] = split.get(name, 0) + left
    return {name: number for name, number in split.items() if number}


_ledgers = WeakValueDictionary[str, PromptLedger]()


def ledger_of(engine: str) -> PromptLedger:
    """Return the ledger that all connectors of this engine in this process share."""
    return _ledgers.setdefault(engine, PromptLedger())
