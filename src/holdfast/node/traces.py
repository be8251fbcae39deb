"""Traces of requests, exported in OpenTelemetry's protocol: lookup, plan, fetch, reads by tier.

A lookup is a child of the engine's own span, if the engine sends its context; the fetch that
carries out the lookup's plan is a child of the lookup. Spans are created when their work is done,
from recorded times, and exported by a thread of the SDK, which drops spans while the collector is
away.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.config import TracesOptions
from holdfast.errors import ConfigError
from holdfast.store.fetch import FetchResult
from holdfast.version import __version__
from holdfast.wire.fields import traceparent
from holdfast.wire.local.messages import Cover, Covered, Fetch

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

LOOKUPS_KEPT = 10_000
"""Number of lookups whose fetch is still found; older ones have no fetch in their trace."""

CLOSE_S = 3.0
"""Time for the export of the remaining spans when the node stops."""

_HEADER = "traceparent"
"""The header of W3C Trace Context."""

_log = logging.getLogger(__name__)


class RequestTraces:
    """Records the spans of one node's requests. Thread-safe; `close` exports what is left."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("holdfast", __version__)
        self._with_span = trace.set_span_in_context
        self._extract = TraceContextTextMapPropagator().extract
        self._lookups: OrderedDict[int, Context] = OrderedDict()

    def close(self) -> None:
        """Export the remaining spans, for `CLOSE_S` at most.

        While the collector is away, the SDK itself waits for half a minute. Its threads are daemons
        and end with the process.
        """
        closing = threading.Thread(
            target=self._provider.shutdown, name="holdfast-traces-close", daemon=True
        )
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            _log.warning("traces: the last spans are lost: no collector took them in %g s", CLOSE_S)

    def lookup(self, request: Cover, covered: Covered, began_ns: int, ended_ns: int) -> None:
        """Record a lookup and its plan; times are in nanoseconds since the epoch."""
        sent = traceparent(request.trace)
        engine = self._extract({_HEADER: sent}) if sent else None
        context = self._span(
            "holdfast.lookup",
            engine,
            (began_ns, ended_ns),
            {
                "holdfast.prompt_tokens": request.tokens,
                "holdfast.engine_tokens": request.have,
                "holdfast.blocks.held": covered.blocks,
                "holdfast.blocks.planned": covered.worth,
                "holdfast.plan": covered.plan,
                "holdfast.plan.reason": covered.reason,
                "holdfast.plan.expected_s": covered.expected_s,
                "holdfast.plan.recompute_s": covered.recompute_s,
                **_by_tier(covered.sources),
            },
        )
        if covered.plan:
            self._lookups[covered.plan] = context
            if len(self._lookups) > LOOKUPS_KEPT:
                self._lookups.popitem(last=False)

    def fetch(self, request: Fetch, result: FetchResult, began_ns: int, ended_ns: int) -> None:
        """Record a fetch, and the reads from each tier below host memory."""
        context = self._span(
            "holdfast.fetch",
            self._lookups.pop(request.plan, None),
            (began_ns, ended_ns),
            {
                "holdfast.plan": request.plan,
                "holdfast.deadline_s": request.deadline_s,
                "holdfast.blocks.fetched": len(result.places),
                "holdfast.outcome": str(result.outcome),
                "holdfast.reason": result.reason,
                **_by_tier(result.sources),
            },
        )
        for read in result.reads:
            attributes: dict[str, str | int | float] = {
                "holdfast.tier": read.tier,
                "holdfast.blocks.asked": read.asked,
                "holdfast.blocks.read": read.arrived,
                "holdfast.bytes": read.nbytes,
            }
            self._span("holdfast.read", context, (read.began_ns, read.ended_ns), attributes)

    def _span(
        self,
        name: str,
        parent: Context | None,
        times_ns: tuple[int, int],
        attributes: Mapping[str, str | int | float],
    ) -> Context:
        """Record a span; return the context for its children."""
        began_ns, ended_ns = times_ns
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=began_ns)
        span.end(ended_ns)
        return self._with_span(span, parent)


def _by_tier(sources: Mapping[str, int]) -> dict[str, int]:
    return {f"holdfast.blocks.from.{tier}": blocks for tier, blocks in sources.items()}


def open_traces(options: TracesOptions) -> RequestTraces | None:
    """Return the traces that a configuration asks for; None if it names no endpoint.

    Raises ConfigError if the packages are not installed.
    """
    if not options.endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError(
            f"traces.endpoint: {options.endpoint!r} needs OpenTelemetry ({error.name} is not "
            "installed); run pip install 'holdfast-kv[traces]', or remove traces"
        ) from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(options.share)),
        resource=Resource.create({"service.name": "holdfast", "service.version": __version__}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=options.endpoint)))
    return RequestTraces(provider)
