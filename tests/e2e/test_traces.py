"""OpenTelemetry traces: what a collector gets over a real socket. `make ray` installs what this needs."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from e2e.harness import ServerProcess, eventually
from minisgl.api import tracing
from minisgl.core.errors import ConfigError
from minisgl.settings.options import ServerArgs

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": "stories"}


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, in protobuf."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        """All spans so far, each with `service`."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                assert names == ["stories"]
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        self.server.bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_a_request_is_a_span_with_its_phases(collector: Collector) -> None:
    with ServerProcess("--otlp-endpoint", collector.url, stub=True, env=SOON) as server, server.client() as client:
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": "one two three four", "max_tokens": 4}
        assert client.post("/v1/completions", json=body, headers=header).status_code == 200
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            stream.read()
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": -1}).status_code == 400
        client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})  # not sampled
        client.get("/health")
        assert eventually(lambda: len(collector.spans()) >= 9)
    spans = collector.spans()  # the server has sent the rest before its end
    roots = [s for s in spans if s.name == "POST /v1/completions"]
    assert len(roots) == 3 and len(spans) == 9
    first = next(s for s in roots if s.parent_span_id.hex() == PARENT)
    assert first.trace_id.hex() == TRACE
    assert all(not s.parent_span_id for s in roots if s is not first)
    for root in roots:
        known = attributes(root)
        children = sorted((s for s in spans if s.parent_span_id == root.span_id), key=lambda s: s.start_time_unix_nano)
        if known["http.response.status_code"] == 400:
            assert not children
            continue
        assert [s.name for s in children] == ["queue", "prefill", "decode"]
        assert {s.trace_id for s in children} == {root.trace_id}
        times = [t for s in children for t in (s.start_time_unix_nano, s.end_time_unix_nano)]
        assert times == sorted(times)
        slack = 1_000_000  # two clocks are read one after the other
        assert root.start_time_unix_nano <= times[0] + slack and times[-1] <= root.end_time_unix_nano + slack
        assert known["gen_ai.usage.output_tokens"] == 4 and known["gen_ai.request.model"] == "minisgl-demo"


def test_variables_are_enough_and_a_dead_collector_costs_nothing(collector: Collector) -> None:
    env = SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with ServerProcess(stub=True, env=env) as server, server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "!error-first"}).status_code == 500
        assert eventually(lambda: len(collector.spans()) >= 1)
        (span, *_) = [s for s in collector.spans() if s.name.startswith("POST")]
        assert span.status.code == 2  # STATUS_CODE_ERROR
        collector.server_close()
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": "a b", "max_tokens": 2}).status_code == 200


def test_what_cannot_work_is_one_sentence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in tracing.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not tracing.is_traced(ServerArgs())
    with pytest.raises(ConfigError, match="--otlp-endpoint localhost:4318 is not an address"):
        tracing.is_traced(ServerArgs(otlp_endpoint="localhost:4318"))
    monkeypatch.setattr(tracing, "_is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"need the extra otel: pip install 'minisgl\[otel\]'"):
        tracing.is_traced(ServerArgs(otlp_endpoint="http://127.0.0.1:4318"))
    monkeypatch.setenv(tracing.VARIABLES[0], "http://127.0.0.1:4318")
    assert not tracing.is_traced(ServerArgs())  # the variables may be those of the whole cluster
    assert "need the extra otel" in caplog.text
