"""The options in `adapter_params` of an `--l2-adapter` of LMCache's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.address import UNIX, is_host_and_port, socket_path, target_named_error
from holdfast.config import check_domain_name, load
from holdfast.errors import ConfigError
from holdfast.prepared import prepared

WHERE = "l2-adapter.adapter_params"
"""Where LMCache's users write the options; the first part of every error."""

LOAD_S = 5.0
"""Default of `load_deadline_s`."""

LOAD_S_MAX = 60.0
CHUNK_TOKENS = 256
"""LMCache's default number of tokens in a chunk."""


@prepared
class AdapterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All options of the adapter.

    `holdfast`: address of a node (`unix:///run/holdfast/node.sock`) or path of the node's YAML
    file. `identity`: what LMCache's keys do not say of the engines, a text that changes whenever
    weights, settings, adapters or versions of the engines change. `domain`: the trust domain.
    `chunk_tokens`: tokens in a chunk, as `--chunk-size`, for statistics. `load_deadline_s`:
    maximum duration of one load.
    """

    holdfast: str
    identity: str
    domain: str = "default"
    chunk_tokens: int = CHUNK_TOKENS
    load_deadline_s: float = LOAD_S

    def __post_init__(self) -> None:
        if not self.identity:
            raise ConfigError(
                f"{WHERE}.identity is not set: LMCache's keys name a model by its name only; write "
                "a text that changes whenever weights, settings, adapters or the version of the "
                "engines change"
            )
        if not self.domain:
            raise ConfigError(f"{WHERE}.domain is empty; omit it for 'default'")
        check_domain_name(f"{WHERE}.domain", self.domain)
        if self.chunk_tokens < 1:
            raise ConfigError(
                f"{WHERE}.chunk_tokens is {self.chunk_tokens}; write LMCache's --chunk-size"
            )
        if not 0 < self.load_deadline_s <= LOAD_S_MAX:
            raise ConfigError(
                f"{WHERE}.load_deadline_s is {self.load_deadline_s:g}; it must be above 0 and at "
                f"most {LOAD_S_MAX:g} seconds"
            )


def read_adapter_options(params: Mapping[str, Any]) -> AdapterOptions:
    """Return the options of an adapter, with the address of a node in `holdfast`.

    Raises ConfigError naming an invalid value.
    """
    known = AdapterOptions.__struct_fields__
    for key in params:
        if key not in known:
            raise ConfigError(f"{WHERE}.{key} is unknown; known are {', '.join(known)}")
    if not params.get("holdfast"):
        raise ConfigError(
            f"{WHERE}.holdfast is not set; start a node with `holdfast serve` and name it: "
            f'"holdfast": "{UNIX}/run/holdfast/node.sock"'
        )
    try:
        options = msgspec.convert({"identity": "", **params}, AdapterOptions)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{WHERE}: {error}") from error
    address = options.holdfast
    if address.endswith((".yaml", ".yml")):
        node = load(address)
        if not node.node_address:
            raise ConfigError(
                f"{WHERE}.holdfast: the node of {address!r} listens on "
                f"{', '.join(node.addresses)} only, and LMCache's server shares memory with its "
                "node; add a unix:///path to its listen"
            )
        return msgspec.structs.replace(options, holdfast=node.node_address)
    try:
        if is_host_and_port(address):
            raise target_named_error(address)
        socket_path(address)
    except ConfigError as error:
        raise ConfigError(f"{WHERE}.holdfast: {error}; or name the node's YAML file") from error
    return options
