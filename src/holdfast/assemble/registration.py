"""Registration of a target in its pool's list of members."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

from holdfast.config import RegisterOptions
from holdfast.errors import ConfigError, MembershipError
from holdfast.membership.etcd_source import EtcdRegistration
from holdfast.membership.members import Member, MemberState
from holdfast.membership.open_source import etcd_options
from holdfast.wire.address import tcp_endpoint


def register(options: RegisterOptions, listening: Sequence[str]) -> EtcdRegistration:
    """Register this target as joining, at its configured address or one that it listens on.

    The caller changes the state when the target serves and when it drains, and closes the
    registration. An etcd that does not answer is retried without limit. Raises ConfigError.
    """
    reachable = (address for address in listening if not tcp_endpoint(address).is_anywhere)
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
