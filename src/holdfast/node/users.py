"""Which users of this machine may use a node, and which of its domains, by the kernel's word."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Mapping, Sequence

from holdfast.config import Config
from holdfast.errors import ConfigError, RefusedError

ROOT = 0


class Users:
    """The node's own user `own`, and for domains that name their users the numbers of those.

    Whoever is the node's user, or root, may look, and enter domains that name nobody; a domain that
    names users is for them only, whoever else asks. Other users may enter domains that name them
    and nothing else.
    """

    def __init__(self, own: int, domains: Mapping[str, frozenset[int]]) -> None:
        self._own = own
        self._domains = domains

    def check_known(self, user: int) -> None:
        """Raise RefusedError for a user who has no business here at all."""
        if self._is_own(user) or any(user in users for users in self._domains.values()):
            return
        raise RefusedError(
            f"user {user} may not use this node, which belongs to user {self._own}; start a node "
            "of your own, or have its domains.NAME.users name you"
        )

    def check_looks(self, user: int) -> None:
        """Raise RefusedError for one who may not look at the node as a whole, or change it."""
        if not self._is_own(user):
            raise RefusedError(
                f"user {user} may use domains of this node and not look at all of it; ask user "
                f"{self._own}, or root"
            )

    def check_enters(self, user: int, domain: str) -> None:
        """Raise RefusedError for one who may not open a session in a domain."""
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


def users_of(config: Config) -> Users:
    """Return who may use a node of this process's user; ConfigError where one never could."""
    own = os.geteuid()
    domains = {
        name: frozenset(_numbers(domain.users, f"domains.{name}.users"))
        for name, domain in config.domains.items()
        if domain.users
    }
    for name, users in domains.items():
        others = sorted(users - {own, ROOT})
        if others and config.socket_group == "":
            raise ConfigError(
                f"domains.{name}.users: user {others[0]} can not open the socket, which is for "
                f"user {own} only; set socket_group to a group that they are in"
            )
    return Users(own, domains)


def group_of(config: Config) -> int | None:
    """Return the group that may open the socket; None: nobody but the node's user."""
    group = config.socket_group
    if isinstance(group, int):
        return group
    try:
        return grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        raise ConfigError(
            f"socket_group: there is no group {group!r} on this machine; make it, or give a number"
        ) from None


def _numbers(users: Sequence[str | int], at: str) -> list[int]:
    numbers = []
    for i, user in enumerate(users):
        try:
            numbers.append(user if isinstance(user, int) else pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise ConfigError(
                f"{at}.{i}: there is no user {user!r} on this machine; make them, or give a number"
            ) from None
    return numbers
