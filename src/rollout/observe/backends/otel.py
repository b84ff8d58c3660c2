"""Traces to OpenTelemetry: spans of its API with the GenAI semantic conventions.

They go to the tracer provider that the process has set, with whatever exporter that has. Where
none is set, and the environment names an OTLP endpoint as the SDK reads it, one is made for it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from rollout.observe.trace_spans import CHAT, TOOL
from rollout.observe.written_values import plain, text_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from rollout.observe.trace_spans import Span

logger = logging.getLogger("rollout.observe")

NAME = "rollout"
SCHEMA = "https://opentelemetry.io/schemas/1.37.0"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: How long the spans that a provider still holds may take.
FLUSH_MS = 10_000
NO_PROVIDER = (
    "observe.trace_backend = 'otel': no tracer provider is set (opentelemetry.trace."
    "set_tracer_provider) and the environment names no OTLP endpoint; nothing is traced"
)
#: Where inputs and outputs go, by kind of span; other kinds have names of ours.
_CONTENT = {
    TOOL: ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result"),
    CHAT: ("gen_ai.input.messages", "gen_ai.output.messages"),
}
_OTHER_CONTENT = ("rollout.input", "rollout.output")


class Backend:
    """Hands traces to a tracer of OpenTelemetry."""

    def __init__(self, project: str) -> None:
        self._own: Any = None
        provider: Any = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            self._own = provider = _provider_of_environment(project) or provider
        if isinstance(provider, trace.ProxyTracerProvider):
            logger.warning(NO_PROVIDER)
            self._own = None
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer(NAME, schema_url=SCHEMA)

    def export(self, root: Span) -> None:
        """See `TraceBackend`."""
        # A trace of its own, whatever span the caller has open.
        self._export(root, trace.set_span_in_context(trace.INVALID_SPAN))

    def close(self) -> None:
        """See `TraceBackend`; the process's own provider stays open."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None:
            flush(FLUSH_MS)
        if self._own is not None:
            self._own.shutdown()

    def _export(self, each: Span, context: Context) -> None:
        span = self._tracer.start_span(
            each.name,
            context,
            SpanKind.CLIENT if each.kind == CHAT else SpanKind.INTERNAL,
            _attributes(each),
            start_time=_nanoseconds(each.began),
        )
        if each.error:
            span.set_attribute("error.type", each.error.partition(":")[0][:80])
            span.set_status(Status(StatusCode.ERROR, each.error))
        if each.children:
            within = trace.set_span_in_context(span, context)
            for child in each.children:
                self._export(child, within)
        span.end(_nanoseconds(each.ended))


def _attributes(each: Span) -> dict[str, Any]:
    """With inputs and outputs, as JSON where they are no text."""
    if each.inputs is None and each.outputs is None:
        return each.attributes
    return each.attributes | _contents(each)


def _contents(each: Span) -> dict[str, str]:
    if each.kind == CHAT and each.outputs is not None:
        parts = [{"type": "text", "content": plain(each.outputs)}]
        said = [{"role": "assistant", "parts": parts}]
        return {"gen_ai.output.messages": msgspec.json.encode(said).decode()}
    taken, given = _CONTENT.get(each.kind, _OTHER_CONTENT)
    found = {}
    if each.inputs is not None:
        found[taken] = text_of(each.inputs)
    if each.outputs is not None:
        found[given] = text_of(each.outputs)
    return found


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _provider_of_environment(project: str) -> Any:
    """A provider with the SDK's exporter, where the environment names its endpoint."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": project}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
