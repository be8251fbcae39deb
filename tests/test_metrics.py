"""The table of metrics, and the text that Prometheus reads."""

import datetime as dt
import re

import msgspec

import holdfast
from holdfast.metrics import (
    ENGINE_NAMES_MAX,
    HISTOGRAMS,
    METRICS,
    OTHER,
    Sample,
    exposition,
    kind_of,
    node_samples,
    process_samples,
)
from holdfast.policy.admit import AdmissionCandidate, AlwaysAdmit, WriteBudget
from holdfast.status import (
    AdmissionStatus,
    CodecStatus,
    DomainStatus,
    EngineLockStatus,
    HistogramStatus,
    NodeStatus,
    PageLockStatus,
    TargetStatus,
    TierStatus,
)
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.wire.remote.credentials import Credentials
from holdfast.wire.remote.token import VERBS, issue
from holdfast_bench.harness.certificates import Authority

LINE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)+\})? \S+')


def samples_of(status):
    return [*node_samples(msgspec.structs.replace(status, target=TargetStatus(connections=1)))]


def test_every_sample_of_a_store_is_in_the_table_with_its_labels():
    with holdfast.open(host="16 MiB") as store:
        for sample in samples_of(store.status()):
            assert len(sample.labels) == len(METRICS[sample.name].labels), sample


def test_names_follow_the_conventions_of_prometheus():
    for name, metric in METRICS.items():
        assert re.fullmatch("[a-z]+(_[a-z]+)*", name)
        assert metric.meaning.endswith(".")
        assert metric.meaning.isascii()


def test_each_line_is_a_comment_or_a_sample_and_each_metric_has_one_head():
    with holdfast.open(host="16 MiB") as store:
        lines = exposition(samples_of(store.status())).splitlines()
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    for line in lines:
        assert line.startswith("# ") or LINE.fullmatch(line), line


def test_a_histogram_has_growing_buckets_a_sum_and_a_count():
    data = HistogramStatus([0.1, 1.0], [2, 0, 3], 7.5)
    assert exposition([Sample("call_seconds", ("fetch",), data)]).splitlines()[2:] == [
        'holdfast_call_seconds_bucket{operation="fetch",le="0.1"} 2',
        'holdfast_call_seconds_bucket{operation="fetch",le="1.0"} 2',
        'holdfast_call_seconds_bucket{operation="fetch",le="+Inf"} 5',
        'holdfast_call_seconds_sum{operation="fetch"} 7.5',
        'holdfast_call_seconds_count{operation="fetch"} 5',
    ]


def test_the_kind_of_a_metric_follows_from_its_name():
    assert kind_of("calls_total") == "counter"
    assert kind_of("leases") == "gauge"
    assert METRICS.keys() >= HISTOGRAMS
    assert kind_of("plan_error") == "histogram"


def test_special_characters_in_a_label_are_escaped():
    text = exposition([Sample("evictions_total", ('a"b\\c\nd',), 1)])
    assert text.splitlines()[-1] == 'holdfast_evictions_total{tier="a\\"b\\\\c\\nd"} 1'


def test_unnamed_domains_share_one_label_value():
    with holdfast.open(host="16 MiB") as store:
        status = store.status()
    strangers = [DomainStatus(f"{n:032x}", used_bytes={"host": 10}) for n in range(1_000)]
    status = msgspec.structs.replace(status, domains=[*status.domains, *strangers])
    used = [each for each in node_samples(status) if each.name == "domain_used_bytes"]
    assert [(each.labels, each.value) for each in used[1:]] == [((OTHER, "host"), 10_000)]


def test_certificates_and_tokens_have_the_unix_time_of_their_end(tmp_path):
    (file := tmp_path / "token").touch(mode=0o600)
    file.write_text(issue(b"k" * 32, "host-a", VERBS, 600, 1_800_000_000))
    tls = Authority(tmp_path).issue("node", expires=dt.datetime(2030, 1, 1, tzinfo=dt.UTC))
    options = StoreOptions(credentials=Credentials(tls, str(file)))
    with Store(16 << 20, [], {"default": b"k" * 32}, options) as store:
        lines = exposition(node_samples(store.status())).splitlines()
        assert 'holdfast_certificate_expiry_seconds{setting="tls.cert"} 1893456000.0' in lines
        assert "holdfast_token_expiry_seconds 1800000600.0" in lines
        file.unlink()
        lines = exposition(node_samples(store.status())).splitlines()
        assert not [line for line in lines if line.startswith("holdfast_token_expiry_seconds")]


def test_a_tiers_write_budget_and_what_is_spent_of_it_are_metrics():
    rule = WriteBudget(AlwaysAdmit(), 240 * 2**20)
    block = AdmissionCandidate(b"n" * 16, "class", 2**20)
    rule.charge(block)
    status = NodeStatus(admission=[AdmissionStatus("disk", rule.figures())], audit_lost=3)
    lines = exposition(node_samples(status)).splitlines()
    for line in (
        'holdfast_tier_write_budget_bytes{tier="disk"} 251658240.0',
        'holdfast_tier_write_budget_spent_bytes{tier="disk"} 1048576.0',
        'holdfast_tier_over_budget_total{tier="disk"} 0.0',
        "holdfast_audit_lost_lines_total 3",
    ):
        assert line in lines


def test_paid_requests_of_a_tier_are_counted_by_verb_with_their_price():
    tiers = [
        TierStatus("object", used_bytes=7, requests={"get": 5, "put": 2}, request_dollars=0.25),
        TierStatus("pool"),
    ]
    lines = exposition(node_samples(NodeStatus(tiers=tiers))).splitlines()
    for line in (
        'holdfast_tier_requests_total{tier="object",verb="get"} 5',
        'holdfast_tier_requests_total{tier="object",verb="put"} 2',
        'holdfast_tier_request_dollars_total{tier="object"} 0.25',
        'holdfast_tier_used_bytes{tier="object"} 7',
    ):
        assert line in lines
    assert not [line for line in lines if "requests" in line and "pool" in line]


def test_locked_memory_is_counted_by_domain_and_by_the_names_of_engines():
    domains = [DomainStatus("acme", configured=True, locked_bytes=3 << 20, kept_bytes=1 << 20)]
    engines = [EngineLockStatus("vllm", "acme", 1 << 20)] * 2
    engines.append(EngineLockStatus("vllm", "acme", 1 << 20, failure="no memory"))
    engines += [EngineLockStatus(f"engine-{n}", "acme") for n in range(40)]
    locks = PageLockStatus(engines, {"returned": 3})
    lines = exposition(node_samples(NodeStatus(domains=domains, page_locks=locks))).splitlines()
    for line in (
        'holdfast_domain_locked_bytes{domain="acme"} 3145728',
        'holdfast_domain_kept_bytes{domain="acme"} 1048576',
        'holdfast_engine_locked_bytes{engine="vllm"} 3145728',
        'holdfast_engine_locked_bytes{engine="other"} 0',
        "holdfast_engines_without_locks 1",
        'holdfast_recalls_total{outcome="returned"} 3',
    ):
        assert line in lines
    names = [line for line in lines if line.startswith("holdfast_engine_locked_bytes")]
    assert len(names) == ENGINE_NAMES_MAX + 1, "an engine's name is what it says"


def test_metrics_of_the_process_have_the_names_that_all_clients_use():
    lines = exposition(process_samples()).splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert names == [name for name in METRICS if name.startswith("process_")]
    assert "# TYPE process_cpu_seconds_total counter" in lines
    assert "# TYPE process_open_fds gauge" in lines


def test_a_codec_has_metrics_of_its_records_and_of_raw_and_stored_bytes():
    codec = CodecStatus(
        tier="disk", encodes=True, encoded=5, decoded=7, kept_raw=2, mismatches=1,
        raw_bytes=140, stored_bytes=100, held_raw_bytes=1_400, held_bytes=1_000,
    )  # fmt: skip
    domain = DomainStatus(
        domain="a", configured=True, used_bytes={"disk": 1_000}, raw_bytes={"disk": 1_400}
    )
    found = samples_of(NodeStatus(codecs=[codec], domains=[domain]))
    values = {(sample.name, *sample.labels): sample.value for sample in found}
    assert values["codec_encodes", "disk"] == 1
    assert values["codec_records_total", "disk", "encoded"] == 5
    assert values["codec_records_total", "disk", "mismatch"] == 1
    assert (
        values["codec_raw_bytes_total", "disk"] / values["codec_stored_bytes_total", "disk"] == 1.4
    )
    assert values["tier_raw_bytes", "disk"] / values["tier_stored_bytes", "disk"] == 1.4
    assert values["domain_used_bytes", "a", "disk"] == 1_000
    assert values["domain_raw_bytes", "a", "disk"] == 1_400
