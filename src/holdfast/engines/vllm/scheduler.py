"""The scheduler side: which tokens of a request are held, what to load, what to save.

Everything here runs on vLLM's scheduler loop and delays every request, so nothing waits: coverage
is asked for when a request arrives and read when vLLM wants to know. Only where the request is the
only one may the answer take a few milliseconds to come.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from holdfast.blocks.key import Chain
from holdfast.engines.vllm.counters import Counts
from holdfast.engines.vllm.hinted import NOTHING, at_end, hint_of, tell
from holdfast.engines.vllm.options import Setting
from holdfast.engines.vllm.patience import Patience
from holdfast.engines.vllm.stopwatch import Chunk, Stopwatch
from holdfast.engines.vllm.teller import Teller
from holdfast.engines.vllm.tracked import Loading, Question, Tracked
from holdfast.engines.vllm.work import Described, Load, Save, Work
from holdfast.errors import NodeGoneError, ProtocolError, RefusedError
from holdfast.limits import CHAIN_BLOCKS_MAX
from holdfast.wire.client import Client
from holdfast.wire.messages import Cover

COVER_MIN_S = 0.05
COVER_MAX_S = 1.0
SAVE_BLOCKS = 1_024
"""Blocks that one request to the node finds room for."""

NODE_SHARE = 0.8
"""How much of that time the node may spend on asking others; the rest is for the way."""

COVER_SHARE = 0.05
"""A request waits this share of what computing it would take to hear what is held of it."""

_log = logging.getLogger("vllm.holdfast")


class Lender(Protocol):
    """What lends a live client, as `wire.link.Link` does."""

    def client(self) -> Client | None:
        """Return the live client, or None while there is none."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


class SchedulerSide:
    """Follows every request; `links` and `worlds` have one entry per tensor-parallel rank."""

    def __init__(
        self,
        links: Sequence[Lender],
        worlds: Sequence[Described],
        setting: Setting,
        teller: Teller,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._links = links
        self._worlds = worlds
        self._block_tokens = worlds[0].block_tokens
        self._page_tokens = worlds[0].page_tokens
        self._setting = setting
        self._teller = teller
        self._patience = Patience()
        self._watch = Stopwatch(now)
        self._token_s = 0.0
        self._now = now
        self._live: set[str] = set()
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._epoch = b""
        self._moving = False

    def on_new_request(self, request: Any) -> None:
        """Start to follow a request, and ask what of it is held."""
        self._live.add(request.request_id)
        hint = hint_of(request)
        self.counts.add("bad_hints", hint is None)
        reason = "bypass" if hint and hint.bypass else why_declined(request)
        if reason:
            self.counts.add(f"declined_{reason}")
            return
        clients = self._clients()
        if clients is None:
            self.counts.add("gone_covers")
            return
        extras = {0: extras_of(request, self._epoch)}
        chains = [
            Chain(
                *(client.welcome.domain_key, world.fingerprint, self._block_tokens, extras),
                client.welcome.segment_blocks,
            )
            for client, world in zip(clients, self._worlds, strict=True)
        ]
        tracked = Tracked(request, chains, hint or NOTHING)
        # Public contexts have no salt: they are nobody's. After a reset they count as new, too.
        again = {0: [b"epoch:" + self._epoch] if self._epoch else []}
        tracked.common = [
            Chain(client.welcome.common_key, world.fingerprint, self._block_tokens, again)
            for client, world in zip(clients, self._worlds, strict=True)
            if client.welcome.common_key
        ]
        self._tracked[request.request_id] = tracked
        self._ask(tracked, clients)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the local ones can be loaded; None: not known yet."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0, False
        if request.num_preemptions != tracked.preemptions:
            # It starts over, and by now its own blocks may be held too.
            tracked.preemptions = request.num_preemptions
            self._ask(tracked, self._clients())
        if tracked.question is not None and not self._answered(tracked, tracked.question):
            return None, False
        if self._asks_again(tracked, local_tokens):
            return None, False
        tracked.local_tokens, tracked.decided_at = local_tokens, self._now()
        if tracked.hopeless:
            return 0, False
        # One token at least is computed, or there would be nothing to sample from.
        whole = (request.num_tokens - 1) // self._page_tokens * self._page_tokens
        tokens = min(tracked.worth * self._block_tokens, whole) - local_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def allocated(self, request: Any, pages: Sequence[int], external_tokens: int) -> None:
        """Plan the load of `external_tokens`; `pages` are all pages of the request."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not external_tokens:
            return
        start, page = tracked.local_tokens, self._page_tokens
        stop = start + external_tokens
        wanted = list(pages[start // page : stop // page])
        first_block, skipped = divmod(start, self._block_tokens)
        keys = tracked.keys(first_block, -(-stop // self._block_tokens))
        tracked.loading = Loading(start, wanted)
        load = Load(request.request_id, keys, wanted, skipped // page, external_tokens)
        self._loads.append(load._replace(plan=tracked.plan, deadline_s=tracked.deadline_s))

    def sources(self, request: Any, external_tokens: int) -> dict[str, int]:
        """Split tokens by the tier they come from, as the node told it; sums up to them."""
        tracked = self._tracked.get(request.request_id)
        held = dict(tracked.sources) if tracked is not None else {}
        left, split = external_tokens, {}
        # The last tier named takes what is left: local hits and the last token blur the figures.
        for name, blocks in sorted(held.items(), key=lambda item: item[1]):
            split[name] = min(left, blocks * self._block_tokens)
            left -= split[name]
        if left:
            name = max(held, key=lambda name: held[name], default="")
            split[name] = split.get(name, 0) + left
        return {name: tokens for name, tokens in split.items() if tokens}

    def build_work(self, output: Any) -> Work:
        """Return what the workers have to do in this step."""
        work = Work(self._loads, tokens=output.total_num_scheduled_tokens)
        self._loads = []
        self._time(output)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not self._setting.saves:
                continue
            # A token counts once it is known and computed: drafts in flight are not known.
            request = tracked.request
            computed = min(request.num_computed_tokens + scheduled, request.num_tokens)
            full = min(tracked.extend(), computed // self._block_tokens, CHAIN_BLOCKS_MAX)
            if full > tracked.saved:
                pages = output.kv_connector_block_state.get_block_ids(request_id)[0]
                work.saves += self._saves(tracked, full, pages)
        return work

    def workers_said(self, output: Any) -> None:
        """Take in which loads ended, and which pages did not arrive."""
        for tracked in self._tracked.values() if output.invalid_block_ids else ():
            pages = tracked.loading.pages if tracked.loading else ()
            bad = [at for at, page in enumerate(pages) if page in output.invalid_block_ids]
            if bad:
                tracked.fail(bad[0], self._page_tokens)
        for request_id in output.finished_recving or ():
            loaded = self._tracked.get(request_id)
            if loaded is not None:
                loaded.loading = None
                loaded.loaded_s = 0.0 if loaded.hopeless else self._now() - loaded.decided_at
        # Several workers report every step; those without a forward are not timed.
        said = output.kv_connector_worker_meta
        if said is not None and said.computed:
            self._watch.end()
        self._moving = said is not None and said.moving
        report = self._watch.report(idle=not self._live)
        if report is not None:
            self._teller.tell(report)

    def moving(self) -> bool:
        """Whether saved blocks are on their way: workers publish them in a later step."""
        return self._moving

    def on_finished(self, request: Any) -> None:
        """Forget a request, and pass on what it said about what comes next."""
        self._live.discard(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        tracked.forget()
        clients = self._clients() if tracked.hint != NOTHING else None
        if clients is not None:
            for client, keys in zip(clients, tracked.keys(0, tracked.saved), strict=True):
                tell(client, at_end(tracked.hint, keys))

    def reset(self) -> None:
        """Never again use what was stored so far; requests under way are left alone."""
        self._epoch = secrets.token_bytes(16)
        for tracked in self._tracked.values():
            tracked.forget()
        self._tracked.clear()

    def close(self) -> None:
        """End the sessions."""
        self._teller.close()
        for link in self._links:
            link.close()

    def _clients(self) -> list[Client] | None:
        clients = [client for link in self._links if (client := link.client()) is not None]
        return clients if len(clients) == len(self._links) else None

    def _ask(
        self, tracked: Tracked, clients: Sequence[Client] | None, local_tokens: int = 0
    ) -> None:
        tracked.forget()
        tracked.told_tokens = local_tokens
        blocks = min(tracked.extend(), CHAIN_BLOCKS_MAX)
        if clients is None or not blocks or tracked.request.skip_reading_prefix_cache:
            return
        replaced = tracked.plan if local_tokens else 0
        prompt = tracked.request.num_tokens, local_tokens, self._setting.fetch_deadline_s
        name, limit_s = tracked.hint.session, NODE_SHARE * self._limit_s(tracked)
        question = Question(blocks, self._now())
        try:
            for client, keys, common in zip(
                clients, tracked.keys(0, blocks), tracked.common_keys(), strict=True
            ):
                question.ask(client, Cover(keys, *prompt, replaced, name, common, limit_s))
        except NodeGoneError:
            self.counts.add("gone_covers")
            question.forget()
            return
        tracked.question = question

    def _asks_again(self, tracked: Tracked, local_tokens: int) -> bool:
        """Ask once more if the engine has blocks that the node's plan did not know of."""
        size = self._block_tokens
        known = local_tokens // size == tracked.told_tokens // size
        if known or tracked.told_tokens or tracked.covered * size <= local_tokens:
            return False
        self._ask(tracked, self._clients(), local_tokens)
        return tracked.question is not None and not self._answered(tracked, tracked.question)

    def _limit_s(self, tracked: Tracked) -> float:
        """Return how long this prompt may wait for an answer: less, the longer none has come."""
        if self._setting.cover_deadline_s is not None:
            return self._patience.of(self._setting.cover_deadline_s)
        share_s: float = COVER_SHARE * self._token_s * tracked.request.num_tokens
        return self._patience.of(min(max(COVER_MIN_S, share_s), COVER_MAX_S))

    def _time(self, output: Any) -> None:
        """Note what a step computes, to learn from how long it takes."""
        if not output.total_num_scheduled_tokens:
            return
        chunks = []
        for request_id, new in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                context = tracked.request.num_computed_tokens
                last = context < tracked.prompt_tokens <= context + new
                chunks.append(Chunk(tracked, new, context, last))
        loading = any(tracked.loading for tracked in self._tracked.values())
        all_known = len(chunks) == len(output.num_scheduled_tokens)
        self._watch.begin(chunks, sound=all_known and not loading)

    def _answered(self, tracked: Tracked, question: Question) -> bool:
        """Read the replies that are here; True once it is settled what is held."""
        try:
            # With nothing else to do, vLLM would make a whole step of waiting: that takes longer.
            # Requests that are not followed have something to do, too, and would wait for this.
            answer = question.answer(expected=len(self._live) == 1)
        except (NodeGoneError, RefusedError, ProtocolError):
            self.counts.add("gone_covers")
            tracked.forget()
            return True
        if answer is not None:
            self._patience.met()
            tracked.learn(answer)
            if answer.recompute_s:
                computed = tracked.request.num_tokens - tracked.told_tokens
                self._token_s = answer.recompute_s / max(1, computed)
            return True
        if self._now() - question.at_s < self._limit_s(tracked):
            return False
        self._patience.lost()
        self.counts.add("late_covers")
        tracked.forget()
        return True

    def _saves(self, tracked: Tracked, full: int, pages: Sequence[int]) -> Iterator[Save]:
        """Yield what is to be saved, in parts: a node's other engines wait while it finds room."""
        while tracked.saved < full:
            stop = min(full, tracked.saved + SAVE_BLOCKS)
            yield self._save(tracked, stop, pages)
            tracked.saved = stop

    def _save(self, tracked: Tracked, full: int, pages: Sequence[int]) -> Save:
        start, per_block = tracked.saved, self._block_tokens // self._page_tokens
        return Save(
            tracked.request.request_id,
            tracked.keys(start, full),
            tuple(chain.parent(start) for chain in tracked.chains),
            tuple(chain.segment(start) for chain in tracked.chains),
            start,
            list(pages[start * per_block : full * per_block]),
            tracked.hint.retention,
        )


def why_declined(request: Any) -> str | None:
    """Return the kind of request that blocks of tokens cannot name, None for the ordinary kind."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "embeds"
    if request.mm_features:
        return "multimodal"
    if request.lora_request is not None:
        return "lora"
    if request.resumable:
        return "streaming_input"
    return None


def extras_of(request: Any, epoch: bytes) -> list[bytes]:
    """Return what sets this request's blocks apart from others of the same tokens."""
    extras = []
    if request.cache_salt:
        extras.append(b"salt:" + request.cache_salt.encode("utf-8", "surrogatepass"))
    if epoch:
        extras.append(b"epoch:" + epoch)
    return extras
