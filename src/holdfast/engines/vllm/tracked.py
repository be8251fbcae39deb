"""One request as the connector follows it: its chain, what is held of it, what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.blocks.key import Chain
from holdfast.engines.vllm.hinted import NOTHING, Hint
from holdfast.errors import ProtocolError
from holdfast.wire.client import Client
from holdfast.wire.messages import Cover, Covered

COMMON_BLOCKS_MAX = 512
"""Leading blocks that are looked for in the public domain."""


class Question:
    """Cover requests on their way, one per tensor-parallel rank, about the first `blocks`."""

    def __init__(self, blocks: int, at_s: float) -> None:
        self.blocks = blocks
        self.at_s = at_s
        self._waiting: list[tuple[Client, int]] = []
        self._covered: list[Covered] = []

    def ask(self, client: Client, cover: Cover) -> None:
        """Ask one rank's node. Raises NodeGoneError: then `forget` what others were asked."""
        self._waiting.append((client, client.send(cover)))

    def answer(self, *, expected: bool = False) -> Covered | None:
        """Return the least that is held and worth fetching, None while a reply is missing.

        What is `expected` is given a moment to come. Raises NodeGoneError, RefusedError or
        ProtocolError.
        """
        missing = []
        for client, request_id in self._waiting:
            reply = client.expect(request_id) if expected else client.poll(request_id)
            if reply is None:
                missing.append((client, request_id))
            elif isinstance(reply, Covered):
                self._covered.append(reply)
            else:
                raise ProtocolError(f"Cover was answered with {type(reply).__name__}")
        self._waiting = missing
        if missing:
            return None
        held = min(reply.blocks for reply in self._covered)
        least = min(self._covered, key=lambda reply: reply.worth)
        return msgspec.structs.replace(least, blocks=held)

    def forget(self) -> None:
        """Drop interest in the replies."""
        for client, request_id in self._waiting:
            client.forget(request_id)


class Loading(NamedTuple):
    """A load under way: its pages, and the token that the first of them starts with."""

    token: int
    pages: Sequence[int]


class Tracked:
    """A request of vLLM, from its arrival to its end.

    `covered`: leading blocks the node holds, as far as we were told; `worth`: those of them to
    use. `saved`: leading blocks that need no saving. `local_tokens`: what the engine has itself,
    `told_tokens`: what of that the node knew when it made `plan` (0: it made none). `decided_at`:
    when it was last said how much is loaded; `loaded_s`: how much later that was there, 0: not.
    """

    def __init__(self, request: Any, chains: Sequence[Chain], hint: Hint = NOTHING) -> None:
        self.request = request
        self.chains = chains
        self.hint = hint
        self.common: Sequence[Chain] = ()
        self.preemptions = request.num_preemptions
        self.prompt_tokens: int = request.num_tokens
        self.question: Question | None = None
        self.covered = self.worth = self.saved = 0
        self.sources: Mapping[str, int] = {}
        self.plan = 0
        self.deadline_s = 0.0
        self.local_tokens = self.told_tokens = 0
        self.decided_at = self.loaded_s = 0.0
        self.loading: Loading | None = None
        self.hopeless = False

    def extend(self) -> int:
        """Name every block the known tokens fill; return how many there are."""
        request, chain = self.request, self.chains[0]
        if request.num_tokens >= (len(chain) + 1) * chain.block_tokens:
            tokens = request.all_token_ids[:]
            for each in self.chains:
                each.extend(tokens)
        return len(chain)

    def keys(self, start: int, stop: int) -> tuple[bytes, ...]:
        """Return the keys of these blocks, one string per rank."""
        return tuple(chain.packed(start, stop) for chain in self.chains)

    def common_keys(self) -> tuple[bytes, ...]:
        """Return the names of the leading blocks in the public domain, one string per rank."""
        for each in self.common:
            size = each.block_tokens
            each.extend(self.request.all_token_ids[: COMMON_BLOCKS_MAX * size])
        named = tuple(chain.packed() for chain in self.common)
        return named if len(named) == len(self.chains) else (b"",) * len(self.chains)

    def learn(self, answer: Covered) -> None:
        """Take the node's answer in; what was saved and is not held is saved again."""
        blocks = min(answer.blocks, self.question.blocks if self.question else 0)
        self.question = None
        self.covered = self.saved = blocks
        self.worth = min(answer.worth, blocks)
        self.sources = answer.sources
        self.plan, self.deadline_s = answer.plan, answer.deadline_s

    def forget(self) -> None:
        """Give up the question: nothing is held, as far as we know."""
        if self.question is not None:
            self.question.forget()
        self.question = None
        self.covered = self.worth = 0
        self.sources = {}

    def fail(self, page: int, page_tokens: int) -> None:
        """A load went wrong from this page on: load no more for this request, save from there."""
        if self.loading is None:
            return
        token = self.loading.token + page * page_tokens
        block = token // self.chains[0].block_tokens
        self.covered = min(self.covered, block)
        self.worth = min(self.worth, block)
        self.saved = min(self.saved, block)
        self.hopeless = True
