"""Validate the users that may open a node's socket, and sessions in its domains."""

from __future__ import annotations

from holdfast.config.options import Config
from holdfast.errors import ConfigError

ID_MAX = (1 << 32) - 2
NOBODY = 65_534
"""The kernel's overflow id: it stands for every user that this user namespace does not map."""


def check_users(config: Config) -> None:
    """Raise ConfigError for the first invalid user or group."""
    for name, domain in config.domains.items():
        at = f"domains.{name}.users"
        for i, user in enumerate(domain.users):
            _check_id(f"{at}.{i}", user)
        if domain.users and not config.node_address:
            raise ConfigError(
                f"{at}: this node has no Unix socket for them to open; remove it, or also listen "
                "on unix:///PATH"
            )
    if config.socket_group != "":
        _check_id("socket_group", config.socket_group)
        if not any(domain.users for domain in config.domains.values()):
            raise ConfigError(
                f"socket_group: {config.socket_group!r} could open the socket, but no domain; "
                "list its users in domains.NAME.users, or remove it"
            )


def _check_id(at: str, value: str | int) -> None:
    if isinstance(value, str):
        if not value or value == "nobody":
            raise ConfigError(f"{at}: {value!r} does not name a user; give a name or a number")
        return
    if not 0 <= value <= ID_MAX or value == NOBODY:
        raise ConfigError(
            f"{at}: {value} is not from 0 to {ID_MAX}, or is {NOBODY}, which stands for any "
            "unknown user; give another"
        )
