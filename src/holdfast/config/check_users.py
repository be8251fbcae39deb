"""Check who may open a node's socket, and sessions in its domains."""

from __future__ import annotations

from holdfast.config.options import Config
from holdfast.errors import ConfigError

ID_MAX = (1 << 32) - 2
NOBODY = 65_534
"""What the kernel calls a user whom this namespace does not know: anybody."""


def check_users(config: Config) -> None:
    """Raise ConfigError for the first that can not be; else return."""
    for name, domain in config.domains.items():
        at = f"domains.{name}.users"
        for i, user in enumerate(domain.users):
            _check_id(f"{at}.{i}", user)
        if domain.users and not config.node_address:
            raise ConfigError(
                f"{at}: this node has no Unix socket that they could open; remove it, or listen on "
                "unix:///PATH as well"
            )
    if config.socket_group != "":
        _check_id("socket_group", config.socket_group)
        if not any(domain.users for domain in config.domains.values()):
            raise ConfigError(
                f"socket_group: {config.socket_group!r} could open the socket and nothing behind "
                "it; name who may in domains.NAME.users, or remove it"
            )


def _check_id(at: str, value: str | int) -> None:
    if isinstance(value, str):
        if not value or value == "nobody":
            raise ConfigError(f"{at}: {value!r} is nobody in particular; give a name, or a number")
        return
    if not 0 <= value <= ID_MAX or value == NOBODY:
        raise ConfigError(
            f"{at}: {value} is not from 0 to {ID_MAX}, or is {NOBODY}, which stands for anybody "
            "unknown; give another"
        )
