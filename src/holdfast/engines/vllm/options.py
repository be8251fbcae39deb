"""The options in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from holdfast.address import is_host_and_port, socket_path, target_named_error
from holdfast.config import EngineOptions, check_domain_name, load
from holdfast.errors import ConfigError
from holdfast.limits import BLOCK_TOKENS
from holdfast.prepared import prepared

EXTRA_CONFIG = "kv_connector_extra_config"
"""Where vLLM's users write the options; the first part of every error."""

Role = Literal["kv_both", "kv_consumer", "kv_producer"]
"""vLLM's `kv_role`: load and save, only load, only save."""

SaveTime = Literal["when_full", "before_eviction", "auto"]
"""When a block is saved: in the step that fills it, before vLLM uses its pages, or by reuse."""

BlockLayout = Literal["exact", "portable"]
"""Whole pages of this build of vLLM, or blocks that other engines read, too."""

SAFE_HASHES = ("sha256", "sha256_cbor")
"""Values of `--prefix-caching-hash-algo` that do not collide."""

COVER_DEADLINE_MS_MAX = 60_000
"""The maximum duration of a load, because a wait for the answer alone must not be longer."""


@prepared
class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All options of the connector.

    `holdfast`: address of a node (`unix:///run/holdfast/node.sock`) or path of the node's YAML
    file, whose `engine` section then applies; empty: a private node that lives as long as the
    engine. `domain`: the trust domain of this engine. `block_tokens`: tokens per block, a multiple
    of vLLM's page; 0: the smallest such multiple from 128 up. `layout`: `exact` blocks are pages of
    this build of vLLM, `portable` blocks are converted, so that other engines and numbers of ranks
    read them. `model_digest`: name of the weights; empty: the weights are read and hashed.
    `save`: when blocks are saved. `cover_deadline_ms`: timeout of the node's coverage answer;
    default: a small share of the time to compute the prompt. `prestage`: have the contexts of
    requests that wait for their turn read into the node's memory. `publish_file`: the secret that
    permits writes, for an engine whose `domain` is public. `fixed_weights`: the weights never
    change while the engine runs, so saved contexts outlive vLLM's sleep and other resets.
    """

    holdfast: str = ""
    domain: str = "default"
    block_tokens: int = 0
    layout: BlockLayout = "exact"
    model_digest: str = ""
    cover_deadline_ms: float | None = None
    prestage: bool = True
    publish_file: str = ""
    save: SaveTime = "when_full"
    fixed_weights: bool = False

    def __post_init__(self) -> None:
        if self.block_tokens < 0:
            raise ConfigError(
                f"{EXTRA_CONFIG}.block_tokens: {self.block_tokens} is below 0; omit it for "
                f"{BLOCK_TOKENS}"
            )
        if self.cover_deadline_ms is not None and not (
            0 < self.cover_deadline_ms <= COVER_DEADLINE_MS_MAX
        ):
            raise ConfigError(
                f"{EXTRA_CONFIG}.cover_deadline_ms: {self.cover_deadline_ms:g} is not above 0 and "
                f"at most {COVER_DEADLINE_MS_MAX:,}; omit it to derive it from the prompt"
            )
        if not self.domain:
            raise ConfigError(f"{EXTRA_CONFIG}.domain is empty; omit it for 'default'")
        check_domain_name(f"{EXTRA_CONFIG}.domain", self.domain)


class ConnectorSettings(NamedTuple):
    """The options resolved, including the `engine` section of a named YAML file.

    `address` empty: a private node. `fetch_deadline_s`: maximum duration of a load.
    `cover_deadline_s` None: derived from the prompt. `loads`, `saves`: what the role permits.
    `prestages`: contexts of waiting requests are prestaged. `adapter_settings`: what vLLM's options
    change in LoRA adapters.
    `shares_loads`: vLLM's prefix cache gives the blocks of a load to other requests.
    `fixed_weights`: a reset leaves all contexts in use. `step_tokens_max`: most tokens that vLLM
    computes in a step; 0: not known. `trusts_pages`: vLLM's hashes say what is in the pages of its
    own cache; with a hash that may collide they do not.
    """

    address: str
    domain: str
    block_tokens: int
    model_digest: str
    cover_deadline_s: float | None
    fetch_deadline_s: float
    saves: bool
    publish: bytes = b""
    loads: bool = True
    layout: BlockLayout = "exact"
    prestages: bool = True
    adapter_settings: str = ""
    save: SaveTime = "when_full"
    shares_loads: bool = True
    fixed_weights: bool = False
    step_tokens_max: int = 0
    trusts_pages: bool = True


def read_options(extra: Mapping[str, Any], role: str = "kv_both") -> ConnectorSettings:
    """Return the settings of vLLM's extra config; raise ConfigError naming an invalid value."""
    if role not in get_args(Role):
        raise ConfigError(f"kv_role: {role!r} is unknown; known are {', '.join(get_args(Role))}")
    known = ConnectorOptions.__struct_fields__
    for key in extra:
        if key not in known:
            raise ConfigError(f"{EXTRA_CONFIG}.{key} is unknown; known are {', '.join(known)}")
    try:
        options = msgspec.convert(dict(extra), ConnectorOptions)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{EXTRA_CONFIG}: {error}") from error
    address, engine = options.holdfast, EngineOptions()
    if address.endswith((".yaml", ".yml")):
        node = load(address)
        if not node.node_address:
            raise ConfigError(
                f"{EXTRA_CONFIG}.holdfast: the node of {address!r} listens on "
                f"{', '.join(node.addresses)} only, and an engine shares memory with its node; "
                "add a unix:///path to its listen"
            )
        address, engine = node.node_address, node.engine
    elif address:
        try:
            if is_host_and_port(address):
                raise target_named_error(address)
            socket_path(address)
        except ConfigError as error:
            raise ConfigError(
                f"{EXTRA_CONFIG}.holdfast: {error}; or name the node's YAML file"
            ) from error
    if role == "kv_producer" and not engine.save:
        raise ConfigError(
            f"kv_role: kv_producer only saves, and engine.save in {options.holdfast!r} is false; "
            "change one of them"
        )
    if role == "kv_producer" and options.save == "before_eviction":
        raise ConfigError(
            f"{EXTRA_CONFIG}.save: before_eviction does not fit kv_role kv_producer, whose "
            "contexts are fetched at once; omit it"
        )
    publish = b""
    if options.publish_file:
        from holdfast.assemble.keys import read_key

        publish = read_key(Path(options.publish_file).expanduser(), f"{EXTRA_CONFIG}.publish_file")
    return ConnectorSettings(
        address=address,
        domain=options.domain,
        block_tokens=options.block_tokens,
        model_digest=options.model_digest or engine.model_digest,
        cover_deadline_s=ms / 1000 if (ms := options.cover_deadline_ms) else None,
        fetch_deadline_s=engine.deadline_s,
        saves=engine.save and role != "kv_consumer",
        publish=publish,
        loads=role != "kv_producer",
        layout=options.layout,
        prestages=options.prestage,
        # What a producer computes is fetched at once.
        save="when_full" if role == "kv_producer" else options.save,
        fixed_weights=options.fixed_weights,
    )


def failure_policy_advice(policy: str) -> str | None:
    """Return advice if a failed load would fail the request; None if it would be recomputed."""
    if policy == "recompute":
        return None
    return (
        f'kv_load_failure_policy is "{policy}": a failed load ends the user\'s request with an '
        'error; write "kv_load_failure_policy":"recompute" in --kv-transfer-config to recompute'
    )


def hash_advice(algorithm: str) -> str | None:
    """Return advice if vLLM's hashes of pages may collide; None if they do not."""
    if algorithm in SAFE_HASHES:
        return None
    return (
        f"--prefix-caching-hash-algo {algorithm} may collide: requests that begin with pages of "
        "vLLM's own cache are not saved, and all blocks are saved when they are full; use "
        f"{' or '.join(SAFE_HASHES)}"
    )


def refit_advice(settings: ConnectorSettings, transfer: Any) -> str | None:
    """Return advice for an engine whose weights are replaced in place; None for any other.

    `transfer`: vLLM's settings of weight transfer, or None. Raises ConfigError if they contradict
    `fixed_weights`.
    """
    if transfer is None:
        return None
    if settings.fixed_weights:
        raise ConfigError(
            f"{EXTRA_CONFIG}.fixed_weights: true, but weight_transfer_config replaces the weights "
            "while the engine runs; omit one of them"
        )
    return (
        "weights of this engine are replaced while it runs: pause it, or call "
        "reset_prefix_cache(reset_connector=True), before each update, because vLLM's own cache "
        "keeps what earlier weights computed"
    )
