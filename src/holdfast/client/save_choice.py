"""When an engine's blocks are saved, chosen from where its prompts find the blocks; pure.

A block that the engine's own cache keeps need not be saved before the engine is about to lose it.
But only a saved block can be found by another engine, or after a restart. The tokens that prompts
reuse tell which of the two matters: those from the engine's own cache, or those from the store.
"""

from __future__ import annotations

from holdfast.client.prompt_ledger import CountedPrompt

PROMPTS_MIN = 16
"""Prompts with reused tokens before the first choice; until then blocks are saved when full."""

MEMORY_PROMPTS = 64
"""Prompts after which an earlier one counts a third: what an engine serves may change."""

STORE_LOW, STORE_HIGH = 0.1, 0.25
"""Shares of the reused tokens that come from the store: below the lower one saves are deferred,
above the higher one blocks are saved when they are full. Between them nothing changes."""


class SaveChoice:
    """Whether saves are deferred, by the prompts counted so far.

    `defers`: blocks are saved when the engine is about to lose them, not when they are full.
    """

    def __init__(self) -> None:
        self.defers = False
        self._prompts = 0
        self._engine_tokens = self._store_tokens = 0.0

    @property
    def store_share(self) -> float:
        """Share of the reused tokens that came from the store; 0 while none was reused."""
        reused = self._engine_tokens + self._store_tokens
        return self._store_tokens / reused if reused else 0.0

    def counted(self, prompt: CountedPrompt) -> None:
        """Note where the tokens of a prompt came from. Prompts that reuse none say nothing."""
        from_store = sum(prompt.loaded.values())
        if not prompt.engine and not from_store:
            return
        kept = 1 - 1 / MEMORY_PROMPTS
        self._prompts += 1
        self._engine_tokens = kept * self._engine_tokens + prompt.engine
        self._store_tokens = kept * self._store_tokens + from_store
        if self._prompts >= PROMPTS_MIN:
            self.defers = self.store_share < (STORE_HIGH if self.defers else STORE_LOW)
