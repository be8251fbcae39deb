"""What a node tells an OpenTelemetry collector about the requests of its engines."""

import gzip
import http.server
import threading
import time
from types import SimpleNamespace

import pytest

from holdfast.config import parse
from holdfast.errors import ConfigError
from holdfast.node.traces import RequestTraces
from holdfast.wire.local import messages as m

sdk = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture
def collector(monkeypatch):
    """Collect spans over HTTP, as OTLP says: `address`, and `spans` in order of their export."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # a node exports every 100 ms
    spans = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            found = service.ExportTraceServiceRequest.FromString(body)
            spans.extend(
                span
                for resource in found.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            )
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield SimpleNamespace(
            address=f"http://127.0.0.1:{server.server_port}/v1/traces", spans=spans
        )
    finally:
        server.shutdown()
        server.server_close()


def attributes_of(span):
    """Return the attributes of a span as plain values."""
    values = {each.key: each.value for each in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def ask(engine, keys, trace):
    """Look a chain up, carry out the plan and release; return the fetched blocks."""
    chain = b"".join(keys)
    covered = engine.call(m.Cover(chain, tokens=128 * len(keys) + 1, trace=trace))
    fetched = engine.call(m.Fetch(chain, 10.0, covered.plan))
    engine.call(m.Release(fetched.lease))
    return len(fetched.places)


def await_spans(collector, name, enough):
    """Wait for enough spans of a name: a node that stops exports the rest for `CLOSE_S` only."""
    end_s = time.monotonic() + 60
    while not enough([span for span in list(collector.spans) if span.name == name]):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def blocks_read(spans):
    return sum(attributes_of(span)["holdfast.blocks.read"] for span in spans)


def test_a_request_is_one_trace_from_the_engine_to_the_tier(start_node, engine, names, collector):
    keys = names("traced", 6)
    node = start_node(traces={"endpoint": collector.address})
    saver = engine(node.address)
    saver.save(keys)
    saver.until_on_disk(6)
    node.stop()
    node.start()
    reader = engine(node.address)
    reader.until(lambda status: status["recovery_s"] is not None)
    assert ask(reader, keys, SAMPLED) == 6
    await_spans(collector, "holdfast.read", lambda spans: blocks_read(spans) == 6)
    node.stop()

    by_name = {span.name: span for span in collector.spans}
    lookup, fetch = by_name["holdfast.lookup"], by_name["holdfast.fetch"]
    reads = [span for span in collector.spans if span.name == "holdfast.read"]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert lookup.parent_span_id.hex() == SPAN
    assert fetch.parent_span_id == lookup.span_id
    assert {read.parent_span_id for read in reads} == {fetch.span_id}

    planned, fetched = attributes_of(lookup), attributes_of(fetch)
    assert planned["holdfast.blocks.held"] == planned["holdfast.blocks.from.disk"] == 6
    assert planned["holdfast.prompt_tokens"] == 769
    assert planned["holdfast.plan"] == fetched["holdfast.plan"] > 0
    assert fetched["holdfast.blocks.fetched"] == 6
    assert fetched["holdfast.outcome"] == "ok"
    assert blocks_read(reads) == 6
    assert {attributes_of(read)["holdfast.tier"] for read in reads} == {"disk"}
    for read in reads:
        assert fetch.start_time_unix_nano <= read.start_time_unix_nano <= read.end_time_unix_nano
        assert read.end_time_unix_nano <= fetch.end_time_unix_nano


def test_a_request_that_the_engine_does_not_sample_is_not_traced(
    start_node, engine, names, collector
):
    keys = names("not traced", 2)
    node = start_node(traces={"endpoint": collector.address})
    one = engine(node.address)
    one.save(keys)
    assert ask(one, keys, NOT_SAMPLED) == 2
    assert ask(one, keys, "what is this?") == 2
    await_spans(collector, "holdfast.fetch", bool)
    node.stop()
    assert {span.trace_id.hex() for span in collector.spans} & {TRACE} == set()
    assert [span.name for span in collector.spans] == ["holdfast.lookup", "holdfast.fetch"]


def test_requests_do_not_wait_for_a_collector_that_is_away(start_node, engine, names):
    node = start_node(traces={"endpoint": "http://127.0.0.1:9/v1/traces"})
    one, keys = engine(node.address), names("away", 2)
    one.save(keys)
    assert [ask(one, keys, "") for _ in range(20)] == [2] * 20


def test_a_node_stops_while_the_sdk_waits_for_the_collector(monkeypatch, caplog):
    from opentelemetry.sdk.trace import TracerProvider

    is_back = threading.Event()

    class Waiting(TracerProvider):
        def shutdown(self):
            is_back.wait(250)

    monkeypatch.setattr("holdfast.node.traces.CLOSE_S", 0.01)
    RequestTraces(Waiting(shutdown_on_exit=False)).close()
    assert not is_back.is_set()
    is_back.set()
    assert "the last spans are lost" in caplog.text


@pytest.mark.parametrize(
    ("traces", "says"),
    [
        ({"endpoint": "127.0.0.1:4318"}, "traces.endpoint: '127.0.0.1:4318' does not begin with"),
        ({"endpoint": "http://c", "share": 0}, r"traces.share: 0 is not in \(0, 1\]"),
        ({"endpoint": "http://c", "share": 1.5}, "traces.share: 1.5 is not in"),
        ({"end": "http://c"}, "end.*endpoint"),
    ],
)
def test_a_wrong_configuration_is_refused(traces, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        parse(
            {
                "listen": f"unix://{tmp_path}/n.sock",
                "tiers": [{"kind": "host", "capacity": "16 MiB"}],
                "traces": traces,
            }
        )


def test_only_valid_traceparents_reach_the_opentelemetry_parser(monkeypatch):
    """Some versions of OpenTelemetry parse a long text in quadratic time."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parsed, extract = [], TraceContextTextMapPropagator.extract

    def parse_header(self, carrier):
        parsed.append(carrier["traceparent"])
        return extract(self, carrier)

    monkeypatch.setattr(TraceContextTextMapPropagator, "extract", parse_header)
    traces = RequestTraces(TracerProvider(shutdown_on_exit=False))
    for trace in (f"{SAMPLED}-" + " " * 40_000 + "\n\nx", "?", f"{SAMPLED}\n", SAMPLED, ""):
        traces.lookup(m.Cover(b"", trace=trace), m.Covered(0, 0, {}), 1, 2)
    traces.close()
    assert parsed == [SAMPLED]
