"""A trace goes from the caller's span through the worker into the result; spans where they are asked for."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from redis import Redis

from conftest import Workers, wait_until
from gristmill import AsyncClient, Client, keys, tracing
from gristmill.errors import InvalidRequestError

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-01", f"00-{TRACE}-00f067aa0ba902b7-00"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """What this process's program has set up, as any program that uses OpenTelemetry."""
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@contextmanager
def collector(found: list[Any]) -> Iterator[str]:
    """An OTLP collector: adds the spans that it is sent to ``found``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = ExportTraceServiceRequest.FromString(body)
            for resource in sent.resource_spans:
                about = {each.key: each.value.string_value for each in resource.resource.attributes}
                found.extend((about, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def otlp(address: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": address,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
    }


def test_a_trace_comes_back_with_every_kind_of_result(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier)
    ok = client.submit(queue, "bread", trace=SAMPLED)
    bad = client.submit(queue, {"text": 5}, trace=SAMPLED)
    late = client.submit(queue, "bread", deadline_s=0, trace=SAMPLED)
    redis.xadd(keys.requests(queue), {"id": "malformed", "body": "{}", "ttl": "soon", "trace": SAMPLED})
    redis.xadd(keys.requests(queue), {"id": "plain", "body": '{"text": "a"}', "trace": "x" * 100_000})
    results = [client.result(each, queue=queue) for each in (ok, bad, late, "malformed")]
    assert [result.status for result in results] == ["ok", "error", "expired", "error"]
    assert {result.trace for result in results} == {SAMPLED}
    assert client.result("plain", queue=queue).trace is None  # what is none is not carried around
    assert b"trace" not in (redis.get(keys.result(queue, "plain")) or b"")


@pytest.mark.parametrize(
    "wrong", ["", "x", SAMPLED.upper(), SAMPLED + "-0", f"ff{SAMPLED[2:]}", f"00-{'0' * 32}-{'1' * 16}-01", 5]
)
def test_a_trace_that_is_none_is_refused_at_the_client(client: Client, queue: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="traceparent"):
        client.submit(queue, "text", trace=wrong)


def test_the_callers_active_span_is_passed_on_and_a_trace_of_its_own_goes_first(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path, redis_url: str, exporter: Any
) -> None:
    workers.start(tiny_classifier)
    exporter.clear()
    with trace.get_tracer("program").start_as_current_span("work") as work:
        results = [client.result(each) for each in client.submit_many(queue, ["a", "b"])]
        client.score(queue, "c")
        streamed = client.score_many(queue, ["d"])[0]
        given = client.result(client.submit(queue, "e", trace=NOT_SAMPLED))

        async def ask() -> None:
            async with AsyncClient(redis_url) as other:
                await other.score(queue, "f")

        asyncio.run(ask())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    sent, scored = spans[f"send {queue}"], spans[f"score {queue}"]
    trace_id = f"{work.get_span_context().trace_id:032x}"
    assert {str(result.trace)[:52] for result in results} == {f"00-{trace_id}-{sent.context.span_id:016x}"}
    assert sent.parent == scored.parent == work.get_span_context()
    assert sent.attributes["messaging.batch.message_count"] == 2
    assert (sent.kind, scored.kind) == (trace.SpanKind.PRODUCER, trace.SpanKind.CLIENT)
    assert str(streamed.trace)[:52] == f"00-{trace_id}-{work.get_span_context().span_id:016x}"
    assert given.trace == NOT_SAMPLED
    assert len([span for span in exporter.get_finished_spans() if span.name == f"score {queue}"]) == 2
    assert tracing.current() is None


def test_a_span_tells_of_a_call_that_failed(client: Client, queue: str, exporter: Any) -> None:
    exporter.clear()
    with pytest.raises(InvalidRequestError):
        client.submit(queue, "text", options={"no": object()})
    [span] = exporter.get_finished_spans()
    assert span.status.status_code == trace.StatusCode.ERROR
    assert "not valid JSON" in span.status.description


def test_a_worker_sends_a_span_of_each_request_in_its_trace_and_one_of_the_batch_with_links(
    client: Client, redis: Redis, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    found: list[Any] = []
    with collector(found) as address:
        client.pause(queue)
        process = workers.start(
            tiny_classifier, config="batch: {max_wait_ms: 50, shapes: [[4, 48]]}", env=otlp(address)
        )
        traced = client.submit_many(queue, ["bread", "water"], trace=SAMPLED)
        client.submit(queue, "the mill", trace=NOT_SAMPLED)
        redis.xadd(keys.requests(queue), {"id": "plain", "body": '{"text": "no trace"}'})
        client.resume(queue)
        wait_until(lambda: len(found) == 3)
        # What has no sampled trace is nobody's matter.
        assert client.score_many(queue, ["bread"] * 3)
        process.terminate()
        assert process.wait(60) == 0
    assert len(found) == 3
    resource = found[0][0]
    assert (resource["service.name"], resource["service.instance.id"]) == ("gristmill-worker", "w0")
    assert resource["deployment.environment"] == "test"
    spans = [span for _, span in found]
    [batch] = [span for span in spans if span.name == f"run {queue}"]
    assert not batch.parent_span_id
    assert {link.trace_id.hex() for link in batch.links} == {TRACE}
    assert len(batch.links) == 2
    requests = [span for span in spans if span.name == f"process {queue}"]
    assert [span.trace_id.hex() for span in requests] == [TRACE] * 2
    assert [span.parent_span_id.hex() for span in requests] == [SAMPLED.split("-")[2]] * 2
    about = [{each.key: each.value for each in span.attributes} for span in requests]
    assert {each["messaging.message.id"].string_value for each in about} == set(traced)
    assert {each["messaging.batch.message_count"].int_value for each in about} == {4}
    assert {link.span_id for span in requests for link in span.links} == {batch.span_id}
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)


def test_a_collector_that_is_away_harms_no_request_and_the_log_stays_json(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    process = workers.start(tiny_classifier, env=otlp("http://127.0.0.1:9"))
    assert client.result(client.submit(queue, "bread", trace=SAMPLED)).ok
    wait_until(lambda: '"library"' in workers.log().read_text("utf-8"))
    assert client.score(queue, "bread")
    process.terminate()
    assert process.wait(60) == 0
    assert all(json.loads(line) for line in workers.log().read_text("utf-8").splitlines())


def test_an_exporter_that_nobody_has_is_said_once_and_the_worker_serves(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, env={"OTEL_TRACES_EXPORTER": "abacus"})
    assert client.score(queue, "bread")
    events = [json.loads(line) for line in workers.log().read_text("utf-8").splitlines()]
    assert ["abacus" in event["error"] for event in events if event["event"] == "spans_off"] == [True]


def test_batches_and_their_requests_are_logged_at_debug_only(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, "--log-level", "debug")
    ids = client.submit_many(queue, ["bread", "water", "the mill"])
    assert all(client.result(each).ok for each in ids)
    text = workers.log().read_text("utf-8")
    events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    batches = [event for event in events if event["event"] == "batch_done"]
    assert sorted(each for batch in batches for each in batch["ids"]) == sorted(ids)
    assert [batch["batch"] for batch in batches] == list(range(1, len(batches) + 1))
    assert sum(batch["size"] for batch in batches) == 3
    second = workers.start(tiny_classifier)
    workers.processes[0].terminate()
    assert workers.processes[0].wait(60) == 0
    client.score_many(queue, ["bread"] * 5)
    assert second.poll() is None
    assert "batch_done" not in workers.log(1).read_text("utf-8")


def test_a_request_that_fails_is_named_in_the_log_with_its_trace(
    client: Client, workers: Workers, queue: str, tiny_classifier: Path
) -> None:
    workers.start(tiny_classifier, program=(str(Path(__file__).with_name("faulty_worker.py")),))
    request_id = client.submit(queue, "explode", trace=SAMPLED)
    assert not client.result(request_id).ok
    events = [json.loads(line) for line in workers.log().read_text("utf-8").splitlines()]
    [failed] = [event for event in events if event["event"] == "request_failed"]
    assert (failed["id"], failed["trace"]) == (request_id, SAMPLED)
