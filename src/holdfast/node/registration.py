"""A target's entry in its pool's list of members: joining, serving, and draining before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Sequence

from holdfast.address import tcp_endpoint
from holdfast.config import RegisterOptions
from holdfast.errors import ConfigError, MembershipError
from holdfast.membership.etcd_source import EtcdRegistration
from holdfast.membership.members import Member, MemberState
from holdfast.membership.open_source import etcd_options
from holdfast.store.store import Store

_POLL_S = 0.2


def register(options: RegisterOptions, listening: Sequence[str]) -> EtcdRegistration:
    """Register this target as joining, at its configured address or one that it listens on.

    The caller closes the registration. An etcd that does not answer is retried without limit.
    Raises ConfigError.
    """
    reachable = (address for address in listening if not tcp_endpoint(address).is_wildcard)
    member = Member(
        id=options.id or socket.gethostname(),
        address=options.address or next(reachable),
        weight=options.weight,
        zone=options.zone,
        state=MemberState.JOINING,
        incarnation=secrets.token_hex(8),
    )
    try:
        return EtcdRegistration(etcd_options(options.members), member)
    except MembershipError as error:
        raise ConfigError(f"register: {error}") from error


async def until_drained(
    over: asyncio.Event, store: Store, entry: EtcdRegistration, drain_s: float
) -> None:
    """Keep the state of a target's list entry current, which the caller owns, until it may end.

    Waits for `over`, announces draining, and returns `drain_s` later or if `over` is set again.
    While it drains, the target still serves, and clients place no new segments on it.
    """

    async def join() -> None:
        while not store.recovery.wait(0):  # noqa: ASYNC110  # a thread's end sets no event
            await asyncio.sleep(_POLL_S)
        entry.announce(MemberState.SERVING)

    joining = asyncio.get_running_loop().create_task(join())
    await over.wait()
    joining.cancel()
    entry.announce(MemberState.DRAINING)
    over.clear()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), drain_s)
