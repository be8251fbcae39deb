"""Which users of this machine may use a node and its domains, by the kernel's user ids."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Mapping

from holdfast.config import Config
from holdfast.errors import ConfigError, RefusedError
from holdfast.wire.local.peer_check import ROOT


class PermittedUsers:
    """Access rules of a node: `own` is the node's user id, `domains` maps a domain to its user ids.

    The node's user and root may operate the node and enter domains that name no users. A domain
    that names users admits only those. Other users may only enter domains that name them.
    """

    def __init__(self, own: int, domains: Mapping[str, frozenset[int]]) -> None:
        self._own = own
        self._domains = domains

    def check_known(self, user: int) -> None:
        """Raise RefusedError for a user who may neither operate the node nor enter any domain."""
        if self._is_own(user) or any(user in users for users in self._domains.values()):
            return
        raise RefusedError(
            f"user {user} may not use this node, which belongs to user {self._own}; start a node "
            "of your own, or have its domains.NAME.users name you"
        )

    def check_operator(self, user: int) -> None:
        """Raise RefusedError for a user who may not inspect or change the node as a whole."""
        if not self._is_own(user):
            raise RefusedError(
                f"user {user} may use domains of this node but not inspect the node; ask user "
                f"{self._own}, or root"
            )

    def check_domain(self, user: int, domain: str) -> None:
        """Raise RefusedError for a user who may not open a session in a domain."""
        users = self._domains.get(domain)
        if users is None:
            if self._is_own(user):
                return
            raise RefusedError(
                f"domain {domain!r} is for user {self._own} only, not for user {user}; have "
                f"domains.{domain}.users name them"
            )
        if user not in users:
            raise RefusedError(
                f"domain {domain!r} is not for user {user}; have domains.{domain}.users name them"
            )

    def _is_own(self, user: int) -> bool:
        return user in (self._own, ROOT)


def users_of(config: Config) -> PermittedUsers:
    """Return the access rules of this process's node; ConfigError if a user could never connect."""
    own = os.geteuid()
    domains: dict[str, frozenset[int]] = {}
    for name, domain in config.domains.items():
        numbers = []
        for i, user in enumerate(domain.users):
            try:
                numbers.append(user if isinstance(user, int) else pwd.getpwnam(user).pw_uid)
            except KeyError:
                raise ConfigError(
                    f"domains.{name}.users.{i}: there is no user {user!r} on this machine; make "
                    "them, or give a number"
                ) from None
        if numbers:
            domains[name] = frozenset(numbers)
    for name, users in domains.items():
        others = sorted(users - {own, ROOT})
        if others and config.socket_group == "":
            raise ConfigError(
                f"domains.{name}.users: user {others[0]} cannot open the socket, which is for "
                f"user {own} only; set socket_group to a group that they are in"
            )
    return PermittedUsers(own, domains)


def group_of(config: Config) -> int | None:
    """Return the group that may open the socket; None: only the node's user may."""
    group = config.socket_group
    if isinstance(group, int):
        return group
    try:
        return grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        raise ConfigError(
            f"socket_group: there is no group {group!r} on this machine; make it, or give a number"
        ) from None
