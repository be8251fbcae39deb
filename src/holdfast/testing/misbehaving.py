"""A tier one of whose methods breaks its promises: a wrong answer, an exception, or no answer."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.tiers.base import LocalTier, SharedTier


class OtherOutcome(enum.StrEnum):
    """An enum with the text of `Outcome.OK` that is not `Outcome`."""

    OK = "ok"


def _raise(_: object) -> object:
    raise RuntimeError("injected")


def _shorter(answer: object) -> object:
    return answer[:-1] if isinstance(answer, Sequence) and answer else -1


def _longer(answer: object) -> object:
    return [*answer, *answer, None] if isinstance(answer, Sequence) else 1 << 80


def _texts(answer: object) -> object:
    return list(map(str, answer)) if isinstance(answer, Sequence) else str(answer)


def _others(answer: object) -> object:
    return [OtherOutcome.OK for _ in answer] if isinstance(answer, Sequence) else OtherOutcome.OK


WRONG_ANSWERS: Mapping[str, Callable[[object], object]] = {
    "None": lambda _: None,
    "texts": _texts,
    "members of another enum": _others,
    "too few": _shorter,
    "too many": _longer,
    "an object": lambda _: object(),
    "an exception": _raise,
}
"""By kind, a function that makes a wrong answer from the right one, or raises an exception."""


class MisbehavingTier:
    """A tier `inner` whose method `method` answers `spoil` of the right answer, while `spoils`.

    It has the methods of the inner tier. `calls` counts the spoilt ones.
    """

    def __init__(
        self, inner: LocalTier | SharedTier, method: str, spoil: Callable[[object], object]
    ) -> None:
        self.name = inner.name
        self.spoils = True
        self.calls = 0
        self._right: Callable[..., object] = getattr(inner, method)
        self._spoil = spoil
        methods: dict[str, Any] = {
            name: getattr(inner, name)
            for name in dir(inner)
            if not name.startswith("_") and callable(getattr(inner, name))
        }
        vars(self).update({**methods, method: self._spoilt})

    def _spoilt(self, *arguments: object) -> object:
        if not self.spoils:
            return self._right(*arguments)
        self.calls += 1
        return self._spoil(self._right(*arguments))


class Stuck:
    """A `spoil` that does not return before `let_go`; the answer is right then."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._may_end = threading.Event()

    def __call__(self, answer: object) -> object:
        self.reached.set()
        self._may_end.wait(60)
        return answer

    def let_go(self) -> None:
        """End the calls in progress and all later ones."""
        self._may_end.set()
