"""Metrics of a node in Prometheus' text format: one table of all of them, and their samples.

The samples come from the status of a node, so a scrape costs one status and no request pays for
it. The format is version 0.0.4:
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

from holdfast.probe import process_figures
from holdfast.status import HistogramStatus, NodeStatus, TargetStatus
from holdfast.tier_totals import tier_totals
from holdfast.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OTHER = "other"
"""Label value of everything that has no name in this node's configuration."""


ENGINE_NAMES_MAX = 32
"""Maximum label values for the names that engines give themselves; the rest is `OTHER`."""


class Metric(NamedTuple):
    """The labels and the meaning of a metric."""

    labels: tuple[str, ...]
    meaning: str


class Sample(NamedTuple):
    """One value of a metric, with the values of its labels in the order of the table.

    Of a histogram, `value` is its counts by bucket and its sum.
    """

    name: str
    labels: tuple[str, ...]
    value: float | HistogramStatus


METRICS: Mapping[str, Metric] = {
    "info": Metric(("version", "incarnation"), "1; the version and this start's id."),
    "uptime_seconds": Metric((), "Seconds since the store was opened."),
    "ready": Metric((), "1 once the disk tiers are recovered."),
    "prompts_total": Metric((), "Prompts that engines and Python sessions computed or loaded."),
    "prompt_tokens_total": Metric(
        (), "Tokens of the prompts that engines and Python sessions computed or loaded."
    ),
    "prompt_tokens_by_source_total": Metric(
        ("source",),
        "Prompt tokens by where their KV came from: engine (its own cache), computed, or the tier "
        "of the store.",
    ),
    "saved_seconds": Metric(
        (),
        "Time to first token saved by fetching: estimated time of computing less the measured "
        "time, summed. Falls if fetches take longer.",
    ),
    "calls_total": Metric(
        ("operation", "outcome"),
        "Calls of the store: lookup, fetch, reserve and save of engines; send and receive of other "
        "nodes.",
    ),
    "call_blocks_total": Metric(
        ("operation",), "Blocks that calls of the store found, fetched or saved."
    ),
    "call_seconds": Metric(("operation",), "Duration of calls of the store."),
    "plans_total": Metric(
        ("ending",), "Plans to fetch that ended: followed, or why they were not."
    ),
    "plan_error": Metric(
        (), "|actual / expected - 1| of the time to first token of plans that were followed."
    ),
    "blocks": Metric((), "Blocks that this node holds or knows of."),
    "tier_capacity_bytes": Metric(("tier",), "Capacity of a tier of this node."),
    "tier_used_bytes": Metric(("tier",), "Bytes used in a tier of this node."),
    "tier_records": Metric(("tier",), "Records in a tier of this node."),
    "tier_read_bytes_total": Metric(("tier",), "Bytes read from a tier."),
    "tier_written_bytes_total": Metric(("tier",), "Bytes written to a tier."),
    "tier_write_budget_bytes": Metric(
        ("tier",), "Bytes that may be written to a tier within a day: its `writes_per_day`."
    ),
    "tier_write_budget_spent_bytes": Metric(
        ("tier",), "Bytes of the present day's write budget that are spent."
    ),
    "tier_over_budget_total": Metric(
        ("tier",), "Writes to a tier that were refused to keep its write budget."
    ),
    "tier_failures_total": Metric(("tier",), "Failed reads and writes of a tier."),
    "tier_rebuilt_records_total": Metric(
        ("tier",), "Records that a pool rebuilt from parity, because a target lacked them."
    ),
    "tier_parity_bytes_total": Metric(
        ("tier",), "Bytes of parity records written; a part of the bytes written."
    ),
    "tier_requests_total": Metric(
        ("tier", "verb"), "Requests to the medium of a tier that is paid by them: an object store."
    ),
    "tier_request_dollars_total": Metric(
        ("tier",), "Price of these requests at the list price of Amazon S3 Standard."
    ),
    "tier_writes_stopped": Metric(
        ("tier",), "1 while a tier takes no new records, because its medium failed."
    ),
    "tier_away": Metric(
        ("tier",), "1 while the medium of a tier cannot be used: the node serves without the tier."
    ),
    "tier_losses_total": Metric(
        ("tier",), "How often a tier lost its medium, and with it all of its blocks."
    ),
    "codec_encodes": Metric(
        ("tier",), "1 while new records of a tier are encoded, 0 while it gets raw ones."
    ),
    "codec_records_total": Metric(
        ("tier", "result"),
        "Records that a tier's codec handled: encoded, decoded, kept_raw (they do not shrink), "
        "mismatch (they decoded to other bytes and were stored raw), undecodable.",
    ),
    "codec_raw_bytes_total": Metric(("tier",), "Bytes of encoded records before encoding."),
    "codec_stored_bytes_total": Metric(("tier",), "Bytes of encoded records after encoding."),
    "tier_raw_bytes": Metric(
        ("tier",), "Raw size of the blocks in a tier below memory, before their codec."
    ),
    "tier_stored_bytes": Metric(("tier",), "Stored size of the same blocks."),
    "tier_reachable": Metric(("tier",), "1 if a shared tier can be reached."),
    "evictions_total": Metric(("tier",), "Copies that left a tier to make room there."),
    "moves_total": Metric(
        ("source", "target", "reason"),
        "Copies made on a tier from another one: save, rewrite, promotion, demotion, renewal or "
        "prestage.",
    ),
    "moved_bytes_total": Metric(
        ("source", "target", "reason"), "Stored bytes of these copies that the target got."
    ),
    "dropped_unmoved_total": Metric(
        ("tier",), "Copies that a tier evicted before they were moved to the tier that takes them."
    ),
    "failed_checks_total": Metric(
        ("tier", "outcome"),
        "Copies that failed a check when they were read: corrupt, or unreadable here.",
    ),
    "waiting_writes": Metric((), "Writes to lower tiers that are queued or running."),
    "leases": Metric((), "Leases that readers hold."),
    "reservations": Metric((), "Reservations that writers hold."),
    "partial_blocks": Metric((), "Blocks of several writers that wait for a writer's part."),
    "abandoned_blocks_total": Metric(
        (), "Blocks of several writers that were not saved, because a part did not come."
    ),
    "domain_used_bytes": Metric(("domain", "tier"), "Bytes of a domain in a tier."),
    "domain_raw_bytes": Metric(
        ("domain", "tier"), "Bytes of a domain in a tier, before their codec."
    ),
    "domain_quota_bytes": Metric(("domain", "tier"), "Quota of a domain in a tier, if it has one."),
    "domain_locked_bytes": Metric(
        ("domain",), "Memory of a domain that engines have page-locked for their GPUs."
    ),
    "domain_kept_bytes": Metric(
        ("domain",), "Page-locked memory of a domain that no block uses at present."
    ),
    "engine_locked_bytes": Metric(("engine",), "Memory that engines of a name have page-locked."),
    "engines_without_locks": Metric((), "Engines that cannot page-lock memory, or no more of it."),
    "recalls_total": Metric(
        ("outcome",),
        "Requests to engines to unlock memory: returned in time, missed, or the session ended.",
    ),
    "audit_events_total": Metric(("action",), "Events of the audit log."),
    "audit_lost_lines_total": Metric((), "Lines of the audit log that could not be written."),
    "quantised_blocks_total": Metric((), "Saved blocks that the lossy codec has quantised."),
    "quantised_bytes_total": Metric((), "Decoded size of the blocks that were quantised."),
    "quantise_exact_blocks_total": Metric(
        (), "Saved blocks of quantised sessions that stayed exact: a value is out of range."
    ),
    "quantise_refusals_total": Metric(
        (), "Sessions that stayed exact, because no gate record permits the codec."
    ),
    "durable_marked_blocks": Metric(("tier",), "Blocks that are durable, as far as remembered."),
    "durable_waiting_blocks": Metric(
        ("tier",),
        "Durable blocks that the durable tier does not hold yet, or has failed to flush.",
    ),
    "durable_waiting_seconds": Metric(("tier",), "Age of the oldest of these blocks."),
    "durable_syncs_waiting": Metric(
        ("tier",), "Callers that wait until durable blocks are on the tier."
    ),
    "durable_sync_deadline_seconds": Metric(
        ("tier",), "Time until the first of these callers gives up; 0 if none waits."
    ),
    "durable_lost_blocks_total": Metric(
        ("tier",), "Durable blocks that were evicted or dropped before the tier had them."
    ),
    "durable_evicted_blocks_total": Metric(
        ("tier",), "Durable blocks that the tier evicted or lost within their time."
    ),
    "scrubbed_copies_total": Metric((), "Copies that the scrub has checked."),
    "member_breaker_open": Metric(
        ("tier", "member"), "1 if the member's circuit breaker is open or half open."
    ),
    "member_ejected": Metric(("tier", "member"), "1 if a member is left out as slow."),
    "member_latency_seconds": Metric(
        ("tier", "member"), "Answer time of a member to requests without records."
    ),
    "certificate_expiry_seconds": Metric(
        ("setting",),
        "Unix time at which a certificate expires: tls.cert, or tls.ca (its last authority).",
    ),
    "certificate_begin_seconds": Metric(
        ("setting",), "Unix time at which the validity of that certificate began."
    ),
    "token_expiry_seconds": Metric((), "Unix time at which the token of this node expires."),
    "target_connections": Metric((), "Connections of other nodes."),
    "target_turned_away_total": Metric(
        (), "Connections of other nodes that were not served, because too many were open or begun."
    ),
    "target_requests_total": Metric((), "Requests of other nodes."),
    "target_refused_total": Metric((), "Requests of other nodes that were refused."),
    "target_received_bytes_total": Metric((), "Bytes received from other nodes."),
    "target_sent_bytes_total": Metric((), "Bytes sent to other nodes."),
    "target_received_blocks_total": Metric((), "Blocks received from other nodes."),
    "target_sent_blocks_total": Metric((), "Blocks sent to other nodes."),
    "process_cpu_seconds_total": Metric((), "Processor time of the process."),
    "process_resident_memory_bytes": Metric((), "Memory of the process that is in RAM."),
    "process_virtual_memory_bytes": Metric((), "Address space of the process."),
    "process_open_fds": Metric((), "Open file descriptors."),
    "process_max_fds": Metric((), "Limit on open file descriptors."),
    "process_start_time_seconds": Metric((), "Unix time at which the process began."),
}
"""Every metric of a node, by its name without the prefix `holdfast_`.

`process_*` have no prefix: these are the names of all Prometheus clients.
"""

_BUDGET_METRICS = {
    "budget_bytes": "tier_write_budget_bytes",
    "spent_bytes": "tier_write_budget_spent_bytes",
    "over_budget": "tier_over_budget_total",
}
"""Metrics of a tier's write budget, by the name of the admission rule's figure."""

HISTOGRAMS = frozenset({"call_seconds", "plan_error"})


def kind_of(name: str) -> Literal["counter", "gauge", "histogram"]:
    """Return the kind of a metric."""
    if name in HISTOGRAMS:
        return "histogram"
    return "counter" if name.endswith("_total") else "gauge"


def exposition(samples: Iterable[Sample]) -> str:
    """Return samples in the text format, grouped by metric in the order of the table."""
    of_metric: dict[str, list[Sample]] = {name: [] for name in METRICS}
    for sample in samples:
        of_metric[sample.name].append(sample)
    lines = list[str]()
    for name, metric in METRICS.items():
        if not of_metric[name]:
            continue
        full = name if name.startswith("process_") else f"holdfast_{name}"
        lines.append(f"# HELP {full} {metric.meaning}")
        lines.append(f"# TYPE {full} {kind_of(name)}")
        for sample in of_metric[name]:
            labels = dict(zip(metric.labels, sample.labels, strict=True))
            value = sample.value
            if not isinstance(value, HistogramStatus):
                lines.append(f"{full}{_labelled(labels)} {value!r}")
                continue
            bounds = [*map(repr, value.bounds), "+Inf"]
            for bound, count in zip(bounds, accumulate(value.counts), strict=True):
                lines.append(f"{full}_bucket{_labelled({**labels, 'le': bound})} {count}")
            lines.append(f"{full}_sum{_labelled(labels)} {value.sum!r}")
            lines.append(f"{full}_count{_labelled(labels)} {sum(value.counts)}")
    return "\n".join([*lines, ""])


def node_samples(status: NodeStatus) -> Iterator[Sample]:
    """Yield the samples of a node's status."""
    activity = status.activity
    yield Sample("info", (__version__, status.incarnation), 1)
    yield Sample("uptime_seconds", (), status.uptime_s)
    yield Sample("ready", (), int(status.recovered))
    yield Sample("prompts_total", (), activity.prompts)
    yield Sample("prompt_tokens_total", (), activity.tokens)
    by_source = {
        "engine": activity.engine_tokens,
        "computed": activity.computed_tokens,
        **activity.loaded_tokens,
    }
    for source, tokens in by_source.items():
        yield Sample("prompt_tokens_by_source_total", (source,), tokens)
    yield Sample("saved_seconds", (), activity.saved_s)
    for name, outcomes in activity.calls.items():
        for outcome, number in outcomes.items():
            yield Sample("calls_total", (name, outcome), number)
        yield Sample("call_blocks_total", (name,), activity.blocks[name])
        yield Sample("call_seconds", (name,), activity.seconds[name])
    for ending, number in activity.plans.items():
        yield Sample("plans_total", (ending,), number)
    yield Sample("plan_error", (), activity.plan_error)
    yield Sample("blocks", (), status.blocks)
    yield from _tier_samples(status)
    # Domains that the configuration does not name are one.
    used_bytes, raw_bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    yield from _lock_samples(status)
    for domain in status.domains:
        name = domain.domain if domain.configured else OTHER
        for tier, nbytes in domain.used_bytes.items():
            used_bytes[name, tier] += nbytes
            raw_bytes[name, tier] += domain.raw_bytes.get(tier, nbytes)
        for tier, nbytes in domain.quota_bytes.items():
            yield Sample("domain_quota_bytes", (name, tier), nbytes)
    for labels, nbytes in used_bytes.items():
        yield Sample("domain_used_bytes", labels, nbytes)
        yield Sample("domain_raw_bytes", labels, raw_bytes[labels])
    yield Sample("waiting_writes", (), status.waiting_to_write)
    yield Sample("leases", (), status.leases)
    yield Sample("reservations", (), status.tickets)
    yield Sample("partial_blocks", (), status.partial_blocks)
    yield Sample("abandoned_blocks_total", (), status.abandoned_blocks)
    for action, number in status.audit.items():
        yield Sample("audit_events_total", (action,), number)
    yield Sample("audit_lost_lines_total", (), status.audit_lost)
    for state in status.credentials:
        if state.expires_s is None or state.begins_s is None:
            continue
        if state.setting.startswith("tls."):
            yield Sample("certificate_expiry_seconds", (state.setting,), state.expires_s)
            yield Sample("certificate_begin_seconds", (state.setting,), state.begins_s)
        else:
            yield Sample("token_expiry_seconds", (), state.expires_s)
    quantise = status.quantise
    yield Sample("quantised_blocks_total", (), quantise.quantised)
    yield Sample("quantised_bytes_total", (), quantise.raw_bytes)
    yield Sample("quantise_exact_blocks_total", (), quantise.left_exact)
    yield Sample("quantise_refusals_total", (), quantise.refusals)
    if (durable := status.durable) is not None:
        yield Sample("durable_marked_blocks", (durable.tier,), durable.marked)
        yield Sample("durable_waiting_blocks", (durable.tier,), durable.waiting)
        yield Sample("durable_waiting_seconds", (durable.tier,), durable.oldest_s)
        yield Sample("durable_syncs_waiting", (durable.tier,), durable.syncs)
        yield Sample("durable_sync_deadline_seconds", (durable.tier,), durable.deadline_s)
        yield Sample("durable_lost_blocks_total", (durable.tier,), durable.lost)
        yield Sample("durable_evicted_blocks_total", (durable.tier,), durable.evicted)
    yield Sample("scrubbed_copies_total", (), status.scrub.checked)
    if status.target is not None:
        yield from _target_samples(status.target)


def _lock_samples(status: NodeStatus) -> Iterator[Sample]:
    """Yield the samples of page-locked memory; none if no engine has asked for it."""
    for domain in status.domains:
        if domain.configured and domain.locked_bytes:
            yield Sample("domain_locked_bytes", (domain.domain,), domain.locked_bytes)
            yield Sample("domain_kept_bytes", (domain.domain,), domain.kept_bytes)
    by_name = Counter[str]()
    for engine in status.page_locks.engines:
        known = engine.engine in by_name or len(by_name) < ENGINE_NAMES_MAX
        by_name[engine.engine if known else OTHER] += engine.locked_bytes
    for name, nbytes in by_name.items():
        yield Sample("engine_locked_bytes", (name,), nbytes)
    if by_name:
        failed = sum(bool(engine.failure) for engine in status.page_locks.engines)
        yield Sample("engines_without_locks", (), failed)
    for outcome, number in status.page_locks.recalls.items():
        yield Sample("recalls_total", (outcome,), number)


def process_samples() -> Iterator[Sample]:
    """Yield the samples of this process; none without /proc."""
    figures = process_figures()
    if figures is None:
        return
    yield Sample("process_cpu_seconds_total", (), figures.cpu_s)
    yield Sample("process_resident_memory_bytes", (), figures.resident_bytes)
    yield Sample("process_virtual_memory_bytes", (), figures.virtual_bytes)
    yield Sample("process_open_fds", (), figures.open_fds)
    yield Sample("process_max_fds", (), figures.max_fds)
    yield Sample("process_start_time_seconds", (), figures.started_s)


def _target_samples(status: TargetStatus) -> Iterator[Sample]:
    yield Sample("target_connections", (), status.connections)
    yield Sample("target_turned_away_total", (), status.turned_away)
    yield Sample("target_requests_total", (), status.requests)
    yield Sample("target_refused_total", (), status.refused)
    yield Sample("target_received_bytes_total", (), status.received_bytes)
    yield Sample("target_sent_bytes_total", (), status.sent_bytes)
    yield Sample("target_received_blocks_total", (), status.received_blocks)
    yield Sample("target_sent_blocks_total", (), status.sent_blocks)


def _tier_samples(status: NodeStatus) -> Iterator[Sample]:
    for tier, usage in tier_totals(status.tiers).items():
        if usage.capacity_bytes:
            yield Sample("tier_capacity_bytes", (tier,), usage.capacity_bytes)
        if usage.capacity_bytes or usage.used_bytes:
            yield Sample("tier_used_bytes", (tier,), usage.used_bytes)
            yield Sample("tier_records", (tier,), usage.records)
        yield Sample("tier_read_bytes_total", (tier,), usage.read_bytes)
        yield Sample("tier_written_bytes_total", (tier,), usage.written_bytes)
        yield Sample("tier_failures_total", (tier,), usage.failures)
        yield Sample("tier_writes_stopped", (tier,), int(bool(usage.writes_stopped)))
        yield Sample("tier_rebuilt_records_total", (tier,), usage.rebuilt)
        yield Sample("tier_parity_bytes_total", (tier,), usage.parity_bytes)
        yield Sample("tier_away", (tier,), int(bool(usage.away)))
        yield Sample("tier_losses_total", (tier,), usage.losses)
        for verb, requests in usage.requests.items():
            yield Sample("tier_requests_total", (tier, verb), requests)
        if usage.requests:
            yield Sample("tier_request_dollars_total", (tier,), usage.request_dollars)
    for codec in status.codecs:
        labels = (codec.tier,)
        yield Sample("codec_encodes", labels, int(codec.encodes))
        for result, number in (
            ("encoded", codec.encoded),
            ("decoded", codec.decoded),
            ("kept_raw", codec.kept_raw),
            ("mismatch", codec.mismatches),
            ("undecodable", codec.undecodable),
        ):
            yield Sample("codec_records_total", (codec.tier, result), number)
        yield Sample("codec_raw_bytes_total", labels, codec.raw_bytes)
        yield Sample("codec_stored_bytes_total", labels, codec.stored_bytes)
        yield Sample("tier_raw_bytes", labels, codec.held_raw_bytes)
        yield Sample("tier_stored_bytes", labels, codec.held_bytes)
    for rule in status.admission:
        for figure, name in _BUDGET_METRICS.items():
            if figure in rule.figures:
                yield Sample(name, (rule.tier,), rule.figures[figure])
    for tier, shared in status.shared.items():
        yield Sample("tier_reachable", (tier,), int(shared.reachable))
        for member in shared.members:
            named = (tier, member.target)
            yield Sample("member_breaker_open", named, int(member.phase != "closed"))
            yield Sample("member_ejected", named, int(member.ejected))
            if member.latency_s is not None:
                yield Sample("member_latency_seconds", named, member.latency_s)
    for tier, number in status.evictions.items():
        yield Sample("evictions_total", (tier,), number)
    for move in status.moves:
        named_move = (move.source, move.target, move.reason)
        yield Sample("moves_total", named_move, move.blocks)
        yield Sample("moved_bytes_total", named_move, move.nbytes)
    for tier, number in status.dropped_unmoved.items():
        yield Sample("dropped_unmoved_total", (tier,), number)
    for failed in status.failed_checks:
        yield Sample("failed_checks_total", (failed.tier, failed.outcome), failed.copies)


def _labelled(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{v.translate(escapes)}"' for name, v in labels.items()) + "}"
