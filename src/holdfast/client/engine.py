"""The engine client: the protocol by which every engine looks up, loads and saves contexts.

An engine opens one client for all KV groups of a model, and asks in tokens: how many leading tokens
of a context can it resume after, and which blocks of which group must it load for that? Each group
has a fingerprint, so a namespace and keys of its own; all share the arena of the domain. Blocks are
copied between the arena and the engine's pages by a device, one for each group.

No call waits: each returns a pending answer, which the engine polls or waits for. A failure is an
outcome of the answer, never an exception: then the engine computes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.group_rules import GroupRule
from holdfast.blocks.key import KEY_BYTES, Chain, Tokens
from holdfast.blocks.layout import LayoutSlice
from holdfast.devices.base import DirectDevice
from holdfast.errors import Outcome
from holdfast.policy.retention import Retention
from holdfast.session import FETCH_S, LOOK_S

T_co = TypeVar("T_co", covariant=True)

NO_TIERS: Mapping[str, int] = MappingProxyType({})


class EngineGroup(NamedTuple):
    """A KV group of a model, as one rank holds it.

    `layout_slice`: the part of each portable block that this rank writes and reads; None: all.
    `retained`: tokens before its window that the engine needs for a resume, too.
    """

    fingerprint: Fingerprint
    layout_slice: LayoutSlice | None = None
    retained: int = 0

    @property
    def rule(self) -> GroupRule:
        """Which blocks of this group a resume needs."""
        meaning = self.fingerprint.meaning
        rule = GroupRule.of(meaning.kv_group, meaning.block_tokens)
        return rule._replace(window=rule.window + self.retained)

    @property
    def writes(self) -> bool:
        """Whether this rank writes any part of a block; of ranks with equal pages, one does."""
        return self.layout_slice is None or bool(self.layout_slice.written_runs())


class ContextKeys(NamedTuple):
    """The keys of one context: a chain for each group, in the order of the groups."""

    chains: tuple[Chain, ...]

    def extend(self, tokens: Tokens) -> None:
        """Add the keys of the new full blocks of `tokens`, which are all tokens of the context."""
        for chain in self.chains:
            chain.extend(tokens)


class LookupOptions(NamedTuple):
    """What an engine tells about a prompt that it looks up.

    `tokens`: length of the whole prompt, whose last token is always computed; 0: one more than the
    blocks of the first group. `have`: leading tokens that the engine holds
    itself. `limit_s`: longest time of the load. `deadline_s`: time for shared tiers, after which
    the answer leaves them out. `session`: name of the context's session, for later hints.
    """

    tokens: int = 0
    have: int = 0
    limit_s: float = FETCH_S
    deadline_s: float = LOOK_S
    session: str = ""


class BlockRun(NamedTuple):
    """Consecutive blocks of one group: the number of the first, and their keys, 16 bytes each."""

    first: int
    keys: bytes

    @property
    def blocks(self) -> range:
        """The numbers of the blocks."""
        return range(self.first, self.first + len(self.keys) // KEY_BYTES)


class Ticket(NamedTuple):
    """The answer to a lookup: what to load, by group, and what is expected of it.

    `tokens`: leading tokens after which to resume, by the plan; those up to `have` the engine has.
    `held`: the most tokens after which every group could resume. `pending`: tokens, `held`
    included, whose blocks are held or are being saved. `runs`: the blocks to load, one run for each
    group, empty if the group needs none. `sources`: tokens to load by tier. `expected_s`: time to
    the first token; `recompute_s`: the same without a load; both 0: not known. `deadline_s`: a load
    that takes longer is computed instead. `plan`: number of the plan, 0: none. `outcome`: OK, MISS,
    or why the store did not answer: LATE, GONE; `reason`: one line for people. `prompt_tokens`:
    length of the prompt, which the store counts: as computed, or when its load has ended.
    """

    tokens: int
    have: int = 0
    held: int = 0
    pending: int = 0
    runs: tuple[BlockRun, ...] = ()
    sources: Mapping[str, int] = NO_TIERS
    expected_s: float = 0.0
    recompute_s: float = 0.0
    deadline_s: float = FETCH_S
    plan: int = 0
    outcome: Outcome = Outcome.MISS
    reason: str = ""
    prompt_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to load."""
        return self.tokens <= self.have


class GroupPages(NamedTuple):
    """Pages of one group in the order of the tokens, and the device that copies them.

    The first is page `first` of the first block. If full attention is the model's only group, the
    last block of a load may be partial. A load leaves out pages that are `devices.base.NO_PAGE`.
    """

    device: DirectDevice
    pages: Sequence[int]
    first: int = 0


class Loaded(NamedTuple):
    """The result of a load: the leading tokens that are valid in the engine's pages.

    `tokens`: `have` of the ticket if nothing is; between it and the ticket's tokens only if the
    model has one group, of full attention. Other pages must not be used. `sources`: verified blocks
    by tier. `outcome` and `reason` tell why tokens are missing, if any are.
    """

    tokens: int
    sources: Mapping[str, int]
    outcome: Outcome
    reason: str


class Saved(NamedTuple):
    """The result of a save: blocks that are new in the store, and why others are not, if so.

    `outcome`: OK if every block is held now or other ranks still write their parts of it, FULL if a
    block got no slot, else GONE. Blocks are readable now; `PendingSave.durable` waits for more.
    """

    blocks: int
    outcome: Outcome
    reason: str = ""


class Pending(Protocol[T_co]):
    """An answer that has not come yet."""

    @abstractmethod
    def poll(self) -> T_co | None:
        """Return the answer if it is there, else None; never waits."""

    @abstractmethod
    def wait(self, timeout_s: float) -> T_co | None:
        """Return the answer if it comes within this time, else None."""

    @abstractmethod
    def cancel(self) -> None:
        """Do without the answer; what it would grant goes back to the store."""


class PendingSave(Pending[Saved], Protocol):
    """A save in progress; its pages must not change until `poll` or `wait` returned its result."""

    @abstractmethod
    def durable(self, deadline_s: float) -> Pending[int]:
        """Have the blocks written to the durable tier; the answer is how many it has flushed.

        Call it after the save has ended.
        """


class EngineClient(Protocol):
    """A store as one engine uses it. Any thread may call it."""

    groups: tuple[EngineGroup, ...]
    unit_tokens: int
    """A context can be resumed after multiples of this many tokens."""

    @abstractmethod
    def context(
        self, tokens: Tokens, extras: Mapping[int, Sequence[bytes]] | None = None
    ) -> ContextKeys:
        """Return the keys of a context in every group.

        `extras[i]`: what token i depends on besides the tokens, such as the hash of an image that
        begins there. It counts for the block of the token, and so for all later ones.
        """

    @abstractmethod
    def lookup(self, context: ContextKeys, options: LookupOptions) -> Pending[Ticket]:
        """Ask how many leading tokens of a context to load, and what they consist of."""

    @abstractmethod
    def load(
        self, ticket: Ticket, pages: Sequence[GroupPages | None], after: Any = None
    ) -> Pending[Loaded]:
        """Load what a ticket names into pages, one entry for each group; None: it needs none.

        `after`: a mark of the engine's work that copies must follow (`Device.mark`). The pages
        belong to the load until its answer; `cancel` does not end that.
        """

    @abstractmethod
    def save(
        self,
        context: ContextKeys,
        blocks: Sequence[range],
        pages: Sequence[GroupPages | None],
        retention: Retention = Retention.SESSION,
    ) -> PendingSave:
        """Save blocks of each group, which are full in these pages now."""

    @abstractmethod
    def close(self) -> None:
        """End loads and saves, and then the session."""
