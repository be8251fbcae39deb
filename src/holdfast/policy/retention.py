"""How long a context is worth keeping, as whoever saves it knows."""

from __future__ import annotations

import enum


class Retention(enum.StrEnum):
    """A class of contexts.

    `ephemeral`: not needed again, so never written below memory, and the first to go there.
    `session`: as the policies see fit. `durable`: written to every tier below at once.
    """

    EPHEMERAL = "ephemeral"
    SESSION = "session"
    DURABLE = "durable"
