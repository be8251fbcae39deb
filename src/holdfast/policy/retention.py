"""Retention classes: the declared lifetime of a saved context."""

from __future__ import annotations

import enum


class Retention(enum.StrEnum):
    """The retention class of a context.

    `ephemeral`: not needed again, so never written below memory, and evicted first from memory.
    `session`: left to the policies. `durable`: written to every tier below at once.
    """

    EPHEMERAL = "ephemeral"
    SESSION = "session"
    DURABLE = "durable"
