"""Reserve slots for a save that copies at once, and again if the caller stalled meanwhile.

A node gives slots to other blocks `RECLAIM_S` after their session or its domain has ended, because
a writer may not know that yet. So nothing is copied into slots that were requested long ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.client.connection import StoreClient
from holdfast.errors import NodeGoneError
from holdfast.limits import FILL_S
from holdfast.wire.local.messages import Abort, Reserve, Reserved

ATTEMPTS = 2


def reserve_slots(
    client: StoreClient,
    request: Reserve,
    timeout_s: float,
    now: Callable[[], float] = time.monotonic,
) -> Reserved:
    """Return slots that were requested at most `FILL_S` seconds ago; `timeout_s` bounds one answer.

    Raises NodeGoneError if there is no answer, or if each was used too late.
    """
    age_s = 0.0
    for _ in range(ATTEMPTS):
        asked_s = now()
        reserved = client.call(request, Reserved, timeout_s)
        age_s = now() - asked_s
        if age_s <= FILL_S:
            return reserved
        client.forget(client.send(Abort(reserved.ticket)))
    raise NodeGoneError(
        f"slots for a save were reserved {age_s:.1f} s before they could be filled; the limit is "
        f"{FILL_S:g} s; relieve this machine of load, or save again"
    )
