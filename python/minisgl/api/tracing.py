"""OpenTelemetry traces (`--otlp-endpoint`, the extra `otel`): spans of each request, its queue, prefill and decode.

Spans are made when the response has ended, from times that are recorded anyway. A thread of the SDK sends them, so a
slow collector delays no request.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.api.frontend import Submission
from minisgl.api.http import MODEL, SUBMISSION
from minisgl.core.errors import ConfigError
from minisgl.settings.options import ServerArgs

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # OpenTelemetry's
PATH: Final = "/v1/traces"
# The fields of a request (`request_log.request_fields`) -> OpenTelemetry's attributes.
ATTRIBUTES: Final = {
    "request_id": "minisgl.request_id",
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "finish_reason": "gen_ai.response.finish_reasons",
}


def is_traced(args: ServerArgs) -> bool:
    """Return whether traces are enabled and possible. Raises `ConfigError` for an option that cannot work."""
    endpoint = args.otlp_endpoint
    if endpoint is None and not any(map(os.environ.get, VARIABLES)):
        return False
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-endpoint {endpoint} is not an address like http://127.0.0.1:4318")
    if all(_is_installed(name) for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")):
        return True
    missing = "traces need the extra otel: pip install 'minisgl[otel]'"
    if endpoint is not None:
        raise ConfigError(f"--otlp-endpoint {endpoint}: {missing}")
    logger.warning("%s; there are none", missing)  # a cluster may set the variables for all its processes
    return False


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


class Traces:
    """Makes the spans of each request. A header `traceparent` (W3C Trace Context) names their parent."""

    def __init__(self, args: ServerArgs) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # OpenTelemetry's environment variables configure the rest.
        endpoint = args.otlp_endpoint and args.otlp_endpoint.rstrip("/").removesuffix(PATH) + PATH
        name = os.environ.get("OTEL_SERVICE_NAME", "minisgl")
        self._provider: TracerProvider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("minisgl")
        self._trace = trace
        self._parent_of = TraceContextTextMapPropagator().extract

    def record(self, scope: Scope, fields: dict[str, Any], began: float) -> None:
        """Send the spans of a request that began at `began`, by the monotonic clock, and ends now."""
        now = time.monotonic()
        epoch = time.time() - now

        def ns(seconds: float) -> int:
            return int(1e9 * (epoch + seconds))

        known = {ATTRIBUTES[name]: value for name, value in fields.items() if name in ATTRIBUTES and value is not None}
        if reasons := known.get(ATTRIBUTES["finish_reason"]):
            known |= {ATTRIBUTES["finish_reason"]: reasons.split(","), "gen_ai.request.model": scope[MODEL].name}
        span = self._tracer.start_span(
            f"{fields['method']} {fields['path']}",
            self._parent_of(Headers(scope=scope)),
            kind=self._trace.SpanKind.SERVER,
            attributes=known,
            start_time=ns(began),
        )
        submission: Submission | None = scope.get(SUBMISSION)
        context = self._trace.set_span_in_context(span)
        for name, (start, end) in ({} if submission is None else submission.timeline.phases()).items():
            self._tracer.start_span(name, context, start_time=ns(start)).end(ns(end))
        if fields["status"] >= 500 or "error" in fields.get("finish_reason", ""):
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(ns(now))

    def close(self) -> None:
        """Send all remaining spans."""
        self._provider.shutdown()
