"""Build a running store from its configuration: the only code that selects implementations."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from holdfast.assemble.domains import (
    DEFAULT_DOMAIN,
    configured_keys,
    default_key,
    open_ring,
    publisher,
    restore_default_key,
)
from holdfast.assemble.node_files import (
    DROPS_FILE,
    ESTIMATES_FILE,
    MARKS_FILE,
    check_first_disk,
)
from holdfast.assemble.rules import quotas, tier_rules
from holdfast.config import Config, HostOptions, tier_kind
from holdfast.keys.audit import AuditLog
from holdfast.limits import DAY_S
from holdfast.plan.planner import BestCut, FetchHeld
from holdfast.policy.choice import POLICIES
from holdfast.store.call_threads import DirectCalls
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.tiers.base import Tier
from holdfast.tiers.kind import TierContext, TierKind
from holdfast.wire.remote.credentials import Credentials


def open_store(config: Config, calls: DirectCalls | None = None) -> Store:
    """Open every tier and start the store; the caller closes it.

    `calls`: the threads that run the store's calls, which are the store's from here on; by default
    the callers' own. Raises ConfigError, FormatError or BusyError; then `calls` are closed and the
    tiers' media unchanged.
    """
    calls = calls or DirectCalls()
    with contextlib.ExitStack() as undo:
        undo.callback(calls.close, 0.0)
        keys = configured_keys(config)
        check_first_disk(config)
        lower: list[Tier] = []
        for number, section in enumerate(config.tiers):
            if not isinstance(section, HostOptions):
                kind, context = configured_tier(config, number)
                lower.append(kind.open(section, context))
                undo.callback(lower[-1].close)
        if DEFAULT_DOMAIN not in keys:
            keys[DEFAULT_DOMAIN] = default_key(config)
        audit = AuditLog(Path(config.audit_file) if config.audit_file else None)
        public_domain, publish_token = publisher(config, keys)
        ring = open_ring(config, keys, audit)
        folder = config.disk_folder
        store_options = StoreOptions(
            planner=BestCut() if config.plan == "best" else FetchHeld(),
            make_eviction=POLICIES[config.policy],
            quotas=quotas(config),
            rules=tier_rules(config, keys),
            ring=ring,
            audit=audit,
            public_domain=public_domain,
            publish_token=publish_token,
            quantise=[name for name, domain in config.domains.items() if domain.quantise != "none"],
            gates=Path(config.gates_folder) if config.gates_folder else None,
            durable=config.durable,
            durable_s=config.durable_days * DAY_S,
            serves_peers=bool(config.target_addresses),
            lease_s=config.lease_s,
            lock_bytes=config.lock_bytes,
            segment_blocks=config.segment_blocks,
            scrub_every_s=config.scrub.every_s,
            scrub_bytes_per_s=config.scrub.rate,
            credentials=node_credentials(config),
            estimates_file=Path(folder, ESTIMATES_FILE) if folder else None,
            drops_file=Path(folder, DROPS_FILE) if folder else None,
            marks_file=Path(folder, MARKS_FILE) if folder else None,
            restore_files=partial(restore_default_key, config, keys),
            calls=calls,
        )
        store = Store(config.host_bytes, lower, keys, store_options)
        undo.pop_all()
        undo.callback(store.close, 0.0)  # which closes the calls and the tiers
        store.start()
        undo.pop_all()
    return store


def node_credentials(config: Config) -> Credentials:
    """Return the credentials that a node shows to targets."""
    return Credentials(config.tls, config.tokens.file, config.open)


def configured_tier(config: Config, number: int) -> tuple[TierKind, TierContext]:
    """Return the kind and context of tier `number`, which is not the host tier."""
    context = TierContext(
        f"tiers.{number}",
        config.tier_names[number],
        config.segment_blocks,
        node_credentials(config),
        config.transport,
    )
    return tier_kind(config.tiers[number]), context
