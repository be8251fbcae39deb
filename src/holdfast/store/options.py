"""Settings of a store that its tiers and domain keys do not imply."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from holdfast.clock import Clock, SystemClock
from holdfast.codec.codec import CodecMode
from holdfast.fairness.shares import Quota
from holdfast.keys.audit import AuditLog
from holdfast.keys.keyring import KeyRing
from holdfast.limits import DURABLE_S, LEASE_S, SEGMENT_BLOCKS
from holdfast.plan.planner import BestCut, Planner
from holdfast.policy.admit import Admission, AlwaysAdmit
from holdfast.policy.base import EvictionPolicy
from holdfast.policy.cost_aware import CostAware
from holdfast.policy.movement import Intake
from holdfast.store.call_threads import DirectCalls
from holdfast.wire.remote.credentials import Credentials

SavedSeconds: TypeAlias = Callable[[int], float]
"""Returns the seconds saved by reading bytes from a tier and not from the next lower one."""


@dataclass(frozen=True)
class TierRules:
    """What one lower tier admits.

    `make_rule` makes the tier's admission rule. `budgets` holds, by domain id, the write budget
    that also limits writes which no rule is asked about. `codec`: whether its records are encoded.
    `intake`: what it takes beside computed blocks. `move_bytes_per_s`: maximum bytes a second that
    are moved to it of blocks that need not be in memory, such as those that other tiers evict.
    """

    make_rule: Callable[[SavedSeconds], Admission] = lambda _: AlwaysAdmit()
    budgets: Mapping[bytes, Admission] = field(default_factory=dict)
    codec: CodecMode = "off"
    intake: Intake = field(default_factory=Intake)
    move_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class StoreOptions:
    """Settings of one store; the defaults suit a store of one process and one domain.

    `make_eviction` makes an eviction policy: one, or one per domain if `quotas` divides the tiers.
    `quotas`: by domain name and tier number (0 is the host), what a domain may hold; domains
    without one share the rest with weight 1. `rules`: by tier number. `ring`: seals and opens the
    blocks of its enrolled domains. `public_domain`: the domain that all may read and holders of
    `publish_token` may write. `serves_peers`: other nodes may store records of domains whose key is
    unknown here. `writes_behind`: saved blocks are written to lower tiers before they are evicted.
    `estimates_file`: where speeds are saved between runs. `drops_file`: names the drops that the
    tiers may not have recorded. `restore_files`: writes small files beside the blocks that a
    replaced drive lacks. `credentials`: those of the node, whose expiry the status reports.
    `quantise`: names of the domains that ask for the codec `int8`; `gates`: the folder of gate
    records. `lock_bytes`: memory that engines of one domain may page-lock; None: no limit but the
    reservations of other domains. `durable`: name of the tier that keeps durable contexts; empty:
    the last one that can flush. `durable_s`: for how long a context that was saved as durable is
    one, in seconds. `marks_file`: keeps the names of durable blocks through a restart. `wall_s`
    returns seconds since 1970.
    """

    planner: Planner = field(default_factory=BestCut)
    make_eviction: Callable[[], EvictionPolicy] = CostAware
    quotas: Mapping[str, Mapping[int, Quota]] | None = None
    rules: Mapping[int, TierRules] = field(default_factory=dict)
    ring: KeyRing | None = None
    audit: AuditLog = field(default_factory=AuditLog)
    public_domain: str = ""
    publish_token: bytes = b""
    quantise: Collection[str] = ()
    gates: Path | None = None
    durable: str = ""
    durable_s: float = DURABLE_S
    marks_file: Path | None = None
    serves_peers: bool = False
    writes_behind: bool = True
    lease_s: float = LEASE_S
    lock_bytes: int | None = None
    segment_blocks: int = SEGMENT_BLOCKS
    scrub_every_s: float = 0.0
    scrub_bytes_per_s: int = 0
    estimates_file: Path | None = None
    drops_file: Path | None = None
    restore_files: Callable[[], object] = lambda: None
    credentials: Credentials = field(default_factory=Credentials)
    calls: DirectCalls = field(default_factory=DirectCalls)
    clock: Clock = field(default_factory=SystemClock)
    wall_s: Callable[[], float] = time.time
