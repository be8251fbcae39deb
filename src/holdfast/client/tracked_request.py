"""A request that an engine tracks: its chains, the blocks held, its plan, the blocks saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.blocks.key import Chain
from holdfast.client.connection import StoreClient
from holdfast.client.engine_queue import EngineQueue
from holdfast.client.request_hints import RequestHint
from holdfast.errors import NotFollowed, ProtocolError
from holdfast.limits import PUBLIC_BLOCKS_MAX
from holdfast.wire.local.messages import Cover, Covered


class PlanRequest:
    """Pending cover requests, one per tensor-parallel rank, about the first `blocks` blocks.

    `is_repeated`: the ranks are asked for the second time, because their answers differed.
    """

    def __init__(self, blocks: int, at_s: float, *, is_repeated: bool = False) -> None:
        self.blocks = blocks
        self.at_s = at_s
        self.is_repeated = is_repeated
        self._waiting: list[tuple[StoreClient, int, Cover]] = []
        self.replies: list[tuple[StoreClient, Cover, Covered]] = []
        """The requests that are answered, one per rank."""

    @property
    def ranks_differ(self) -> bool:
        """Whether the plans of the ranks fetch different numbers of blocks."""
        return len({covered.worth for *_, covered in self.replies}) > 1

    def ask(self, client: StoreClient, cover: Cover) -> None:
        """Ask one rank's node. If it raises NodeGoneError, call `forget` for the other ranks."""
        self._waiting.append((client, client.send(cover), cover))

    def answer(
        self, within_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> Covered | None:
        """Return the answer with the fewest blocks of all ranks; None while a reply is missing.

        Waits up to `within_s` by the clock `now`, in all. Raises NodeGoneError, RefusedError or
        ProtocolError.
        """
        missing: list[tuple[StoreClient, int, Cover]] = []
        until_s = now() + within_s
        for client, request_id, cover in self._waiting:
            left_s = until_s - now()
            wait = left_s > 0 and not missing
            reply = client.expect(request_id, left_s) if wait else client.poll(request_id)
            if reply is None:
                missing.append((client, request_id, cover))
            elif isinstance(reply, Covered):
                self.replies.append((client, cover, reply))
            else:
                raise ProtocolError(f"Cover was answered with {type(reply).__name__}")
        self._waiting = missing
        if missing:
            return None
        answers = [covered for *_, covered in self.replies]
        held = min(each.blocks for each in answers)
        least = min(answers, key=lambda each: each.worth)
        return msgspec.structs.replace(least, blocks=held)

    def node_is_runnable(self) -> bool:
        """Return whether a node that has not replied is ready to run."""
        return any(client.node_is_runnable() for client, *_ in self._waiting)

    def forget(self) -> None:
        """Ignore the replies."""
        for client, request_id, _ in self._waiting:
            client.forget(request_id)


class PendingLoad(NamedTuple):
    """A load under way: its pages, and the token that the first of them starts with."""

    token: int
    pages: Sequence[int]


class PlanEnd(NamedTuple):
    """How a plan of the node ended at the engine, without the time of the first token.

    `decided_at`: when the engine last got the number of tokens to load; `loaded_s`: how much later
    they were in the engine's pages, 0 if they never were. `not_followed`: why the plan was not
    carried out; None if it was.
    """

    plan: int
    loaded_s: float
    decided_at: float
    not_followed: NotFollowed | None = None


class TrackedRequest:
    """A request of an engine, from its arrival to its end.

    `chains`: of the first KV group, one per rank; `groups`: those of every group. `common`:
    chains with the key of the public domain; empty without one. `covered`: leading blocks, of
    `unit_tokens` each, that the node holds, by its last answer; `planned_blocks`: those of them
    that the node's plan fetches, or that it assumed in the engine's own cache. `group_saved`:
    leading blocks of each group that need no saving; of a recurrent one, those up to the last state
    saved after which every group can be resumed. `prompt_tokens`: tokens computed before
    the next first token; after a preemption this includes the generated tokens. `local_tokens`:
    tokens in the engine's own cache; `planned_local_tokens`: the number that the node assumed
    in `plan` (a plan number, 0: no plan, or its end was noted). `planned_queue`: the engine's
    queue that the first plan for this prompt assumed; None once it was asked for again.
    `decided_at` and `loaded_s`: as in `PlanEnd`. `may_save`: False if its pages may be wrong,
    which only the engine learns, and later.
    """

    def __init__(
        self,
        request: Any,
        chains: Sequence[Chain],
        common: Sequence[Chain],
        hint: RequestHint,
        more_chains: Sequence[Sequence[Chain]] = (),
    ) -> None:
        """`more_chains`: of the model's other KV groups, each with an entry per rank."""
        self.request = request
        self.chains = chains
        self.groups = [chains, *more_chains]
        self.group_saved = [0] * len(self.groups)
        self.unit_tokens = math.lcm(*(group[0].block_tokens for group in self.groups))
        self.hint = hint
        self.common = common
        self.restarts = 0
        self.prompt_tokens: int = request.num_tokens
        self.question: PlanRequest | None = None
        self.covered = self.planned_blocks = 0
        self.sources: Mapping[str, int] = {}
        self.plan = 0
        self.deadline_s = 0.0
        self.local_tokens = self.planned_local_tokens = 0
        self.decided_at = self.loaded_s = 0.0
        self.planned_queue: EngineQueue | None = None
        self.loading: PendingLoad | None = None
        self.load_failed = False
        self.may_save = True

    @property
    def saved(self) -> int:
        """Leading blocks of the first KV group that need no saving."""
        return self.group_saved[0]

    @property
    def resumable_blocks(self) -> int:
        """Leading blocks, of `unit_tokens` each, that need no saving in any group."""
        saved = zip(self.group_saved, self.groups, strict=True)
        return min(number * group[0].block_tokens for number, group in saved) // self.unit_tokens

    @property
    def ready_tokens(self) -> int:
        """Leading tokens that need no computing, by the plan; all while the plan is not known."""
        if self.request.num_computed_tokens:
            computed: int = self.request.num_computed_tokens
            return computed
        if self.question is not None:
            return self.prompt_tokens
        return max(self.local_tokens, self.planned_blocks * self.unit_tokens)

    def restart(self, restarts: int) -> None:
        """Restart after a preemption: the tokens generated so far are computed again, too.

        `restarts`: how often the engine has preempted the request.
        """
        self.restarts = restarts
        self.prompt_tokens = self.request.num_tokens
        self.loaded_s = 0.0

    def end_plan(self, why: NotFollowed | None = None) -> PlanEnd | None:
        """End the plan and return how it ended; None without a plan.

        `why`: the reason if the plan was not carried out.

        A plan assumes the local tokens that the engine reported. If the engine had more or fewer
        full blocks, the plan counts as not followed, because other blocks were fetched or computed.
        """
        plan, self.plan = self.plan, 0
        if not plan:
            return None
        size = self.unit_tokens
        had, planned = self.local_tokens // size, self.planned_local_tokens // size
        if why is None and had != planned:
            why = NotFollowed.HAD if had > planned else NotFollowed.LOST
        return PlanEnd(plan, self.loaded_s, self.decided_at, why)

    def extend(self) -> int:
        """Compute the keys of all blocks that the known tokens fill; return the first group's."""
        request = self.request
        if any(
            request.num_tokens >= (len(group[0]) + 1) * group[0].block_tokens + group[0].lookahead
            for group in self.groups
        ):
            tokens = request.all_token_ids[:]
            for group in self.groups:
                for each in group:
                    each.extend(tokens)
        return len(self.chains[0])

    def keys(self, start: int, stop: int, group: int = 0) -> tuple[bytes, ...]:
        """Return the keys of these blocks of a group, one string per rank."""
        return tuple(chain.packed(start, stop) for chain in self.groups[group])

    def common_keys(self) -> tuple[bytes, ...]:
        """Return the leading blocks' keys in the public domain, one string per rank."""
        for each in self.common:
            size = each.block_tokens
            each.extend(self.request.all_token_ids[: PUBLIC_BLOCKS_MAX * size])
        named = tuple(chain.packed() for chain in self.common)
        return named if len(named) == len(self.chains) else (b"",) * len(self.chains)

    def learn(self, answer: Covered) -> None:
        """Apply the node's answer; blocks that were saved and are not held are saved again."""
        blocks = min(answer.blocks, self.question.blocks if self.question else 0)
        self.question = None
        self.covered = blocks
        self._saved_up_to(blocks)
        self.planned_blocks = min(answer.worth, blocks)
        self.sources = answer.sources
        self.plan, self.deadline_s = answer.plan, answer.deadline_s

    def forget(self) -> None:
        """Drop the pending question and the last answer: no block counts as held."""
        if self.question is not None:
            self.question.forget()
        self.question = None
        self.covered = self.planned_blocks = 0
        self.sources = {}

    def stop_saving(self) -> None:
        """Record that nothing says whether the pages of this request are right."""
        self.may_save = False

    def fail(self, page: int, page_tokens: int) -> None:
        """Record that a load failed from this page on: load nothing more, and save from there."""
        if self.loading is None:
            return
        token = self.loading.token + page * page_tokens
        block = token // self.chains[0].block_tokens
        self.covered = min(self.covered, block)
        self.planned_blocks = min(self.planned_blocks, block)
        self.group_saved[0] = min(self.saved, block)
        self.load_failed = True

    def fail_all(self) -> None:
        """Record that a load in several groups failed: load nothing more, and save everything."""
        self.covered = self.planned_blocks = 0
        self._saved_up_to(0)
        self.load_failed = True

    def _saved_up_to(self, blocks: int) -> None:
        """Note that blocks of `unit_tokens` need no saving, in any group."""
        tokens = blocks * self.unit_tokens
        self.group_saved = [tokens // group[0].block_tokens for group in self.groups]
