"""A target's own entry in its pool's list of members."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

from holdfast.assemble.pool import etcd_options
from holdfast.config import RegisterOptions
from holdfast.errors import ConfigError, MembershipError
from holdfast.tiers.pool.member_etcd import EtcdRegistration
from holdfast.tiers.pool.members import Member, State
from holdfast.wire.address import tcp_endpoint


def register(options: RegisterOptions, listening: Sequence[str]) -> EtcdRegistration:
    """Announce this target as joining, at the address that is given, or one where it listens.

    The caller says when it serves and when it drains, and closes it. An etcd that does not answer
    is tried again and again. Raises ConfigError.
    """
    places = (address for address in listening if not tcp_endpoint(address).is_anywhere)
    member = Member(
        id=options.id or socket.gethostname(),
        address=options.address or next(places),
        weight=options.weight,
        zone=options.zone,
        state=State.JOINING,
        incarnation=secrets.token_hex(8),
    )
    try:
        return EtcdRegistration(etcd_options(options.members), member)
    except MembershipError as error:
        raise ConfigError(f"register: {error}") from error
