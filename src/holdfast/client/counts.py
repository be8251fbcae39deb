"""What an engine's client counts: calls of the store, prompts, bytes; by name and labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from holdfast.client.prompt_ledger import CountedPrompt

REFUSED = "refused"
"""Outcome of a call that the store refuses, or for which it refuses the session."""


@dataclass
class ClientCounts:
    """Counts since they were last taken.

    A key is a name and the values of its labels, joined by "/". Only the value of the last label
    may contain "/".
    """

    data: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, *labels: str, number: float = 1) -> None:
        """Count `number` more of `name`."""
        if number:
            key = "/".join((name, *labels))
            self.data[key] = self.data.get(key, 0) + number

    def add_prompt(self, prompt: CountedPrompt) -> None:
        """Count a prompt and its tokens by source."""
        self.add("prompts")
        self.add("prompt_tokens", number=prompt.tokens)
        sources = {"engine": prompt.engine, "computed": prompt.computed, **prompt.loaded}
        for source, tokens in sources.items():
            self.add("prompt_tokens_by_source", source, number=tokens)

    def add_all(self, other: Mapping[str, float]) -> None:
        """Add other counts, by key."""
        for key, number in other.items():
            self.data[key] = self.data.get(key, 0) + number

    def take(self) -> Self | None:
        """Return and reset the counts; None if there are none."""
        if not self.data:
            return None
        taken, self.data = self.data, {}
        return type(self)(taken)
