"""The status of a store, node or target as structs; one form for commands, metrics, pages, wire.

Every field has a default, so that a reader decodes the status of an older node. Unknown fields,
such as those of a newer node, are ignored. Times are in seconds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from holdfast.errors import ProtocolError
from holdfast.prepared import prepared

T = TypeVar("T")


class StatusFields(msgspec.Struct, frozen=True):
    """Base of all parts of a status: `status["tiers"]` is `status.tiers`, as in its JSON form."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  # the field's own type
        """Return a field by its name; raise KeyError for another name."""
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)


@prepared
class TierStatus(StatusFields, frozen=True):
    """Usage of one tier, and its counters since start.

    `writes_stopped`: why it takes no new records for now, as words that follow "writes stopped";
    empty while it does. `away`: why its medium cannot be used, as words that follow "away"; empty
    while it can. `replaced`: when its medium was replaced, as words that follow "replaced"; empty
    if it was not. `losses`: how often it lost its medium. `trouble`: why the tier's own report
    could not be used; empty if it could. `rebuilt`: records computed from parity of others.
    `requests`: paid requests to its medium, by verb, at a list price of `request_dollars`.
    `unlisted_records`, `unlisted_bytes`: what it keeps although it cannot be opened or read here.
    """

    tier: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    records: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    failures: int = 0
    writes_stopped: str = ""
    rebuilt: int = 0
    parity_bytes: int = 0
    away: str = ""
    replaced: str = ""
    losses: int = 0
    requests: dict[str, int] = {}
    request_dollars: float = 0.0
    unlisted_records: int = 0
    unlisted_bytes: int = 0
    trouble: str = ""

    @property
    def conditions(self) -> dict[str, str]:
        """What is unusual about its medium, by name: "away", "writes stopped", "replaced"."""
        found = {"away": self.away, "writes stopped": self.writes_stopped}
        found["replaced"] = self.replaced
        return {name: why for name, why in found.items() if why}


@prepared
class MemberStatus(StatusFields, frozen=True):
    """One member of a shared tier, as this node's own requests found it.

    `phase` is that of the circuit breaker. `latency_s` is that of questions, `first_byte_s` that of
    reads that found something; 95 % of these ended within `late_s`. None: not measured.
    `trouble`: why the member cannot be used; empty if it can. `page`: URL of its status page;
    empty if it has none, or is not connected.
    """

    target: str
    phase: str = "closed"
    ejected: bool = False
    in_flight_bytes: int = 0
    latency_s: float | None = None
    first_byte_s: float | None = None
    late_s: float | None = None
    failure_share: float = 0.0
    breaker_opened: int = 0
    ejections: int = 0
    trouble: str = ""
    page: str = ""


class SharedTierStatus(StatusFields, frozen=True):
    """Whether a shared tier can be reached, and the members that it knows.

    `trouble`: why the tier's own report could not be used; empty if it could. `limits`: what this
    node's credentials do not permit there, in words.
    """

    reachable: bool = True
    members: list[MemberStatus] = []
    trouble: str = ""
    limits: str = ""

    @property
    def outage(self) -> str:
        """Why no member can be reached; empty if one can."""
        if self.reachable:
            return ""
        troubles = [f"{each.target}: {each.trouble}" for each in self.members if each.trouble]
        return "; ".join(troubles) or "no member answers"


class AdmissionStatus(StatusFields, frozen=True):
    """Figures of the rule that admits blocks to a tier, by name."""

    tier: str
    figures: dict[str, float] = {}


@prepared
class QuantiseStatus(StatusFields, frozen=True):
    """What the lossy codec did since start. `domains`: those that ask for it, by name.

    `quantised`: blocks of `raw_bytes` that were saved in its form. `left_exact`: blocks that were
    saved exact, because they have a value out of its range. `refusals`: sessions whose blocks stay
    exact, because no gate record permits the codec.
    """

    domains: list[str] = []
    quantised: int = 0
    raw_bytes: int = 0
    left_exact: int = 0
    refusals: int = 0


@prepared
class CodecStatus(StatusFields, frozen=True):
    """Encoding of records on their way to one tier, and decoding on their way back, since start.

    `mode`: the tier's option. `encodes`: whether new records are encoded now. `encoded`: records of
    `raw_bytes`, stored in `stored_bytes`; `quantised` of them by the lossy codec. `kept_raw`:
    records that did not shrink by 5 %, or were not tried because others of their model did not.
    `mismatches`: records that were stored raw, because the encoded form did not decode to the same
    bytes. `undecodable`: records that were read and could not be decoded. `held_raw_bytes`,
    `held_bytes`: raw and stored size of the copies that the tier has now, as this node knows them.
    `read_bytes_per_s`: stored bytes from the tier, `decode_bytes_per_s`: raw bytes of one decoding
    thread, of `threads`.
    """

    tier: str
    mode: str = "off"
    encodes: bool = False
    encoded: int = 0
    quantised: int = 0
    decoded: int = 0
    kept_raw: int = 0
    mismatches: int = 0
    undecodable: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    held_raw_bytes: int = 0
    held_bytes: int = 0
    read_bytes_per_s: float = 0.0
    decode_bytes_per_s: float = 0.0
    threads: int = 0

    @property
    def held_ratio(self) -> float:
        """Raw bytes per stored byte of the copies that the tier has; 1 if it has none."""
        return self.held_raw_bytes / self.held_bytes if self.held_bytes else 1.0

    @property
    def used(self) -> bool:
        """Whether the codec has anything to report: it is on, or it met encoded records."""
        return self.mode != "off" or self.decoded > 0 or self.held_raw_bytes != self.held_bytes


class DomainStatus(StatusFields, frozen=True):
    """Usage of one domain by tier, and its limits; `configured`: `domain` is its name, not its id.

    `used_bytes` are stored bytes, `raw_bytes` those of the same blocks before their codec, both by
    tier. `unreadable`: records that the present key ring cannot open. `locked_bytes`: memory that
    its engines have page-locked; of these, no block uses `kept_bytes`.
    """

    domain: str
    configured: bool = False
    unreadable: int = 0
    share: float = 1.0
    reserved_bytes: int = 0
    used_bytes: dict[str, int] = {}
    raw_bytes: dict[str, int] = {}
    quota_bytes: dict[str, int] = {}
    locked_bytes: int = 0
    kept_bytes: int = 0


class FailedChecks(StatusFields, frozen=True):
    """Number of copies on a tier that failed a check when they were read, by outcome."""

    tier: str
    outcome: str
    copies: int = 0


class MoveStatus(StatusFields, frozen=True):
    """Copies made from one tier on another since start, for one reason, and their bytes there.

    `reason`: save, rewrite, promotion or demotion.
    """

    source: str
    target: str
    reason: str
    blocks: int = 0
    nbytes: int = 0


class HistogramStatus(StatusFields, frozen=True):
    """Counts by bucket, one more than the buckets' upper bounds, and the sum of all values."""

    bounds: list[float] = []
    counts: list[int] = msgspec.field(default_factory=lambda: [0])
    sum: float = 0.0


class ActivityStatus(StatusFields, frozen=True):
    """Counters of a store since it was opened; tokens are those of prompts, by their source.

    `calls`: by operation and outcome. `blocks`, `seconds`: by operation. `plans`: by ending.
    """

    prompts: int = 0
    tokens: int = 0
    engine_tokens: int = 0
    loaded_tokens: dict[str, int] = {}
    computed_tokens: int = 0
    calls: dict[str, dict[str, int]] = {}
    blocks: dict[str, int] = {}
    seconds: dict[str, HistogramStatus] = {}
    plans: dict[str, int] = {}
    plan_error: HistogramStatus = HistogramStatus()
    saved_s: float = 0.0


class TierCurve(StatusFields, frozen=True):
    """Hits of recent requests by multiples of a tier's capacity: "0.5", "1", "2" and "10"."""

    tier: str
    capacity_bytes: int = 0
    hits: dict[str, float] = {}


class CurveStatus(StatusFields, frozen=True):
    """What exact LRU stores would have hit of a node's recent requests, as shares of their tokens.

    `accesses`: their blocks, repeats included; `unique_blocks` of them are distinct, of
    `block_bytes` each. `unlimited`: hits of a store without a limit. `left_out`: recent requests
    with another block size.
    """

    requests: int = 0
    span_s: float = 0.0
    tokens: int = 0
    accesses: int = 0
    unique_blocks: int = 0
    block_tokens: int = 0
    block_bytes: float = 0.0
    unlimited: float = 0.0
    left_out: int = 0
    tiers: list[TierCurve] = []


class HintStatus(StatusFields, frozen=True):
    """Sessions that hints follow, contexts that wait to be prestaged, and bytes that hints keep.

    `pinned_bytes`: those of pins; `staged_bytes`: those of prestages that no request has used yet.
    """

    sessions: int = 0
    prestaging: int = 0
    pinned_bytes: int = 0
    staged_bytes: int = 0


class FaultStatus(StatusFields, frozen=True):
    """A copy that failed its check: key, fingerprint and domain id as hex digits."""

    key: str
    fingerprint: str
    domain: str
    tier: str
    outcome: str


class MemoryStatus(StatusFields, frozen=True):
    """Bytes of the host tiers of all domains together."""

    capacity_bytes: int = 0
    resident_bytes: int = 0
    reclaimed_bytes: int = 0


class EngineLockStatus(StatusFields, frozen=True):
    """Memory that one session of an engine has page-locked, or why it cannot lock memory."""

    engine: str
    domain: str = ""
    locked_bytes: int = 0
    failure: str = ""


class PageLockStatus(StatusFields, frozen=True):
    """Page locks of all engines. `recalls`: by outcome: returned, missed, or ended."""

    engines: list[EngineLockStatus] = []
    recalls: dict[str, int] = {}


class ScrubStatus(StatusFields, frozen=True):
    """Passes of the scrub, the copies and bytes that it checked, and how many were corrupt."""

    passes: int = 0
    checked: int = 0
    bytes: int = 0
    corrupt: int = 0


class CredentialState(StatusFields, frozen=True):
    """A file of credentials, the setting that names it, and when it begins and expires.

    Times are Unix seconds, None if the file cannot be read. `period`: when it expires, in words.
    `trouble`: why it cannot be used, with the remedy; empty if it can. `soon`: whether it expires
    within the time at which warnings begin. `may`: the permissions of a token.
    """

    setting: str
    file: str
    begins_s: float | None = None
    expires_s: float | None = None
    period: str = ""
    trouble: str = ""
    soon: bool = False
    may: tuple[str, ...] = ()


class DomainTraffic(StatusFields, frozen=True):
    """Bytes of records that a target received for a domain, and sent; named as in DomainStatus."""

    domain: str
    configured: bool = False
    received_bytes: int = 0
    sent_bytes: int = 0


class PlanTimes(StatusFields, frozen=True):
    """Seconds until all blocks of a plan are fetched, and until the first token; None: unknown."""

    fetched_s: float | None = None
    first_token_s: float | None = None


class PlanStatus(StatusFields, frozen=True):
    """One plan of the store: its question, its expectation, and how it ended.

    `plan` is its number, `recompute_s` the estimated time to the first token without a fetch.
    `landed_blocks`: None until the fetch ends. `not_followed`: why it was not carried out.
    """

    plan: int
    age_s: float = 0.0
    engine: str = ""
    fingerprint: str = ""
    prompt_tokens: int = 0
    have_tokens: int = 0
    held_blocks: int = 0
    blocks: int = 0
    reason: str = ""
    expected: PlanTimes = PlanTimes()
    recompute_s: float = 0.0
    deadline_s: float = 0.0
    actual: PlanTimes = PlanTimes()
    landed_blocks: int | None = None
    outcome: str = ""
    not_followed: str | None = None


class PlanAccuracy(StatusFields, frozen=True):
    """How many plans ended, and how far their first tokens were from the expected time.

    `median_error`: of `|actual / expected - 1|`, None if no plan counts. `not_followed` counts
    plans that were not carried out; the other figures leave them out.
    """

    ended: int = 0
    within_25_percent: int = 0
    median_error: float | None = None
    late: int = 0
    not_followed: int = 0


class TierSpeed(StatusFields, frozen=True):
    """The estimate of reads from a tier; `reads`: number of measured ones, 0 if it is assumed."""

    tier: str
    reads: int = 0
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    queued_bytes: float = 0.0


class ComputeCost(StatusFields, frozen=True):
    """Seconds of a step: `a` a step, `b` a token, `c` a token and token before it."""

    a: float
    b: float
    c: float


class DeliverySpeed(StatusFields, frozen=True):
    """The estimate of copies from memory into an engine's pages."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    queued_bytes: float = 0.0


class EngineSpeed(StatusFields, frozen=True):
    """The estimates of an engine; `cost`: None until it has reported how fast it computes."""

    engine: str
    fingerprint: str = ""
    steps: int = 0
    cost: ComputeCost | None = None
    delivery: DeliverySpeed = DeliverySpeed()


@prepared
class PlansStatus(StatusFields, frozen=True):
    """The last plans of a store, newest first, their accuracy, and the estimates behind them."""

    plans: list[PlanStatus] = []
    right: PlanAccuracy = PlanAccuracy()
    tiers: list[TierSpeed] = []
    engines: list[EngineSpeed] = []


class TargetStatus(StatusFields, frozen=True):
    """Counters of a node's service for other nodes; `sending_bytes`: in memory, being sent.

    `domains`: the traffic of each domain, the largest first, at most 64 of them.
    """

    connections: int = 0
    accepted: int = 0
    turned_away: int = 0
    protocol_errors: int = 0
    requests: int = 0
    refused: int = 0
    corrupt: int = 0
    received_bytes: int = 0
    received_blocks: int = 0
    sent_bytes: int = 0
    sent_blocks: int = 0
    sending_bytes: int = 0
    domains: list[DomainTraffic] = []


@prepared
class DurableStatus(StatusFields, frozen=True):
    """Blocks saved as durable that the durable tier does not hold yet, and the age of the oldest.

    `waiting` counts them, and those that the tier holds but failed to flush, up to 65,536 blocks.
    `marked`: all durable blocks. `syncs`: calls that wait for an acknowledgement; `deadline_s`:
    time until the first of them gives up. `lost`: blocks that were evicted or dropped before the
    tier had them, `evicted`: blocks that it evicted or lost while they were durable, both since
    start.
    """

    tier: str
    marked: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    oldest_s: float = 0.0
    syncs: int = 0
    deadline_s: float = 0.0
    lost: int = 0
    evicted: int = 0


@prepared
class NodeStatus(StatusFields, frozen=True):
    """What a store holds and has done.

    `role`: "node" serves engines, "target" serves other nodes, "node and target" both, "store" a
    Python program. `recovery_s`: None until the disk tiers are recovered. `tickets`: reservations
    of writers. `partial_blocks`: blocks of several writers that wait for a part.
    `abandoned_blocks`: those of which a part did not come. `audit_lost`: lines of the audit log
    that could not be written. `dropped_unmoved`: by tier, copies that it evicted before they were
    moved to the tier that takes them.
    `target`: None for a store of a Python program. `durable`: None without a durable tier.
    """

    version: str = ""
    host: str = ""
    role: str = "store"
    addresses: list[str] = []
    incarnation: str = ""
    blocks: int = 0
    tiers: list[TierStatus] = []
    codecs: list[CodecStatus] = []
    quantise: QuantiseStatus = QuantiseStatus()
    admission: list[AdmissionStatus] = []
    domains: list[DomainStatus] = []
    evictions: dict[str, int] = {}
    moves: list[MoveStatus] = []
    dropped_unmoved: dict[str, int] = {}
    failed_checks: list[FailedChecks] = []
    activity: ActivityStatus = ActivityStatus()
    uptime_s: float = 0.0
    leases: int = 0
    tickets: int = 0
    partial_blocks: int = 0
    abandoned_blocks: int = 0
    waiting_to_write: int = 0
    durable: DurableStatus | None = None
    hints: HintStatus = HintStatus()
    recovered_blocks: int = 0
    recovery_s: float | None = None
    recovered: bool = False
    audit: dict[str, int] = {}
    audit_lost: int = 0
    shared: dict[str, SharedTierStatus] = {}
    faults: list[FaultStatus] = []
    memory: MemoryStatus = MemoryStatus()
    page_locks: PageLockStatus = PageLockStatus()
    scrub: ScrubStatus = ScrubStatus()
    credentials: list[CredentialState] = []
    target: TargetStatus | None = None


def read_status(data: object) -> NodeStatus:
    """Return the status in a node's answer. Raises ProtocolError for anything else."""
    return read_as(data, NodeStatus)


def read_curve(data: object) -> CurveStatus:
    """Return the curve in a node's answer. Raises ProtocolError for anything else."""
    return read_as(data, CurveStatus)


def read_plans(data: object) -> PlansStatus:
    """Return the plans in a node's answer. Raises ProtocolError for anything else."""
    return read_as(data, PlansStatus)


def read_as(data: object, kind: type[T]) -> T:
    """Return a part of a node's answer as a struct. Raises ProtocolError for anything else."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"the node's status cannot be read: {error}; install the same version of holdfast on "
            "both sides"
        ) from error
