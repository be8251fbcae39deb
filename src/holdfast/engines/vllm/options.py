"""What a user may write in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.config import EngineOptions, load
from holdfast.errors import ConfigError
from holdfast.limits import BLOCK_TOKENS
from holdfast.prepared import prepared
from holdfast.wire.address import socket_path

_AT = "kv_connector_extra_config"

COVER_DEADLINE_MS_MAX = 60_000
"""As long as a load may take at most: a wait for the answer alone that is longer is a mistake."""


@prepared
class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every option of the connector.

    `holdfast`: address of a node (`unix:///run/holdfast/node.sock`) or path of the YAML file it is
    configured with, whose `engine` section then counts too; empty: a private node that lives as
    long as the engine. `domain`: the trust domain of this engine. `block_tokens`: tokens per
    block, a multiple of vLLM's page; 0: the smallest such multiple from 128 up. `model_digest`:
    names the weights, instead of reading them. `cover_deadline_ms`: how long a request waits to
    hear what is held; left out, a small share of what computing it would take. `publish_file`:
    for an engine whose `domain` is public: the secret that lets it write there.
    """

    holdfast: str = ""
    domain: str = "default"
    block_tokens: int = 0
    model_digest: str = ""
    cover_deadline_ms: float | None = None
    publish_file: str = ""

    def __post_init__(self) -> None:
        if self.block_tokens < 0:
            raise ConfigError(
                f"{_AT}.block_tokens: {self.block_tokens} is below 0; "
                f"leave it out for {BLOCK_TOKENS}"
            )
        if self.cover_deadline_ms is not None and not (
            0 < self.cover_deadline_ms <= COVER_DEADLINE_MS_MAX
        ):
            raise ConfigError(
                f"{_AT}.cover_deadline_ms: {self.cover_deadline_ms:g} is not above 0 and at most "
                f"{COVER_DEADLINE_MS_MAX:,}; leave it out for what suits the prompt"
            )
        if not self.domain:
            raise ConfigError(f"{_AT}.domain is empty; leave it out for 'default'")


class Setting(NamedTuple):
    """What the options come to, with the node's own configuration read where it was named.

    `address` empty: a private node. `fetch_deadline_s`: most a load may take. `cover_deadline_s`
    None: what suits the prompt.
    """

    address: str
    domain: str
    block_tokens: int
    model_digest: str
    cover_deadline_s: float | None
    fetch_deadline_s: float
    saves: bool
    publish: bytes = b""


def read_options(extra: Mapping[str, Any]) -> Setting:
    """Return what vLLM's extra config asks for; raise ConfigError naming the key at fault."""
    known = Options.__struct_fields__
    for key in extra:
        if key not in known:
            raise ConfigError(f"{_AT}.{key} is unknown; known are {', '.join(known)}")
    try:
        options = msgspec.convert(dict(extra), Options)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{_AT}: {error}") from error
    address, engine = _node(options.holdfast)
    return Setting(
        address=address,
        domain=options.domain,
        block_tokens=options.block_tokens,
        model_digest=options.model_digest or engine.model_digest,
        cover_deadline_s=ms / 1000 if (ms := options.cover_deadline_ms) else None,
        fetch_deadline_s=engine.deadline_s,
        saves=engine.save,
        publish=_secret(options.publish_file) if options.publish_file else b"",
    )


def _secret(file: str) -> bytes:
    from holdfast.assemble.keys import read_key

    return read_key(Path(file).expanduser(), f"{_AT}.publish_file")


def _node(holdfast: str) -> tuple[str, EngineOptions]:
    """Return the address behind the one key everybody sets, and what its file says to engines."""
    if holdfast.endswith((".yaml", ".yml")):
        node = load(holdfast)
        if not node.node_address:
            raise ConfigError(
                f"{_AT}.holdfast: the node of {holdfast!r} listens on {', '.join(node.addresses)} "
                "only, and an engine shares memory with its node; add a unix:///path to its listen"
            )
        return node.node_address, node.engine
    if holdfast:
        try:
            socket_path(holdfast)
        except ConfigError as error:
            raise ConfigError(f"{_AT}.holdfast: {error}; or name the node's YAML file") from error
    return holdfast, EngineOptions()


def failure_policy_advice(policy: str) -> str | None:
    """Return what to tell a user whose requests would fail where they could be recomputed."""
    if policy == "recompute":
        return None
    return (
        f'kv_load_failure_policy is "{policy}": a load that fails ends the user\'s request with an '
        'error. Write "kv_load_failure_policy":"recompute" in --kv-transfer-config to have it '
        "computed instead"
    )
