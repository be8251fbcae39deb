"""The options in SGLang's `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from holdfast.address import UNIX, is_host_and_port, socket_path, target_named_error
from holdfast.config import check_domain_name, load
from holdfast.errors import ConfigError
from holdfast.prepared import prepared

EXTRA_CONFIG = "hicache-storage-backend-extra-config"
"""Where SGLang's users write the options; the first part of every error."""

GET_S = 5.0
"""Default of `get_deadline_s`."""

GET_S_MAX = 60.0

OF_SGLANG = (
    *("backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
    "hicache_storage_pass_prefix_keys",
)
"""Keys of the same JSON that SGLang itself reads."""


BlockLayout = Literal["exact", "portable"]


@prepared
class StorageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All options of the storage backend.

    `holdfast`: address of a node (`unix:///run/holdfast/node.sock`) or path of the node's YAML
    file. `domain`: the trust domain of this engine. `layout`: `exact` blocks are pages of this
    build of SGLang, `portable` blocks are converted and named by tokens, so that other engines find
    and read them. `model_digest`: name of the weights; empty: the weights are read and hashed.
    `get_deadline_s`: maximum duration of one batch of reads. `images`: serve requests with images,
    which SGLang names by 64 bits of a hash.
    """

    holdfast: str
    domain: str = "default"
    layout: BlockLayout = "exact"
    model_digest: str = ""
    get_deadline_s: float = GET_S
    images: bool = False

    def __post_init__(self) -> None:
        if not self.domain:
            raise ConfigError(f"{EXTRA_CONFIG}: domain is empty; omit it for 'default'")
        check_domain_name(f"{EXTRA_CONFIG}: domain", self.domain)
        if not 0 < self.get_deadline_s <= GET_S_MAX:
            raise ConfigError(
                f"{EXTRA_CONFIG}: get_deadline_s is {self.get_deadline_s:g}; it must be above 0 "
                f"and at most {GET_S_MAX:g} seconds"
            )


def read_options(extra: Mapping[str, Any]) -> StorageOptions:
    """Return the options of SGLang's extra config, with the address of a node in `holdfast`.

    Raises ConfigError naming an invalid value.
    """
    known = StorageOptions.__struct_fields__
    own = {key: value for key, value in extra.items() if key not in OF_SGLANG}
    for key in own:
        if key not in known:
            raise ConfigError(
                f"{EXTRA_CONFIG}: {key!r} is unknown; Holdfast's are {', '.join(known)}, SGLang's "
                f"{', '.join(OF_SGLANG)}"
            )
    if not own.get("holdfast"):
        raise ConfigError(
            f"{EXTRA_CONFIG}: holdfast is not set; start a node with `holdfast serve` and name it: "
            f'"holdfast": "{UNIX}/run/holdfast/node.sock"'
        )
    try:
        options = msgspec.convert(own, StorageOptions)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{EXTRA_CONFIG}: {error}") from error
    return msgspec.structs.replace(options, holdfast=_node_address(options.holdfast))


def _node_address(named: str) -> str:
    if named.endswith((".yaml", ".yml")):
        address = load(named).node_address
        if not address:
            raise ConfigError(
                f"{EXTRA_CONFIG}: the node of {named!r} has no unix:///path in its listen, and an "
                "engine shares memory with its node; add one"
            )
        return address
    try:
        if is_host_and_port(named):
            raise target_named_error(named)
        socket_path(named)
    except ConfigError as error:
        raise ConfigError(
            f"{EXTRA_CONFIG}: holdfast: {error}; or name the node's YAML file"
        ) from error
    return named
