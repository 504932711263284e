"""Traces: one from the producer to the worker, over retries, the delayed set and takeovers."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from taskrunner import Reject, Retry, Task, TaskAlreadyDispatchedError, TaskRunner, otel
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.message import members
from tests.support import eventually
from tests.support.fleet import Fleet
from tests.support.names import Names
from tests.support.worker import ROOT

SECRET = "a-secret-in-the-payload"


class Traces:
    """Runners that are traced, and what they exported."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        otel.instrument(fleet.producer, self.provider)

    def runner(self, **options: Any) -> TaskRunner:
        """A traced runner, not started yet."""
        runner = self.fleet.make(**options)
        otel.instrument(runner, self.provider)
        return runner

    def spans(self, name: str, count: int | None = None) -> Sequence[ReadableSpan]:
        """The spans of a name that have ended; waits for so many."""

        def found() -> list[ReadableSpan]:
            spans = [span for span in self._exporter.get_finished_spans() if span.name == name]
            return sorted(spans, key=lambda span: span.start_time or 0)

        if count is not None:
            eventually(lambda: len(found()) >= count, 20, message=lambda: repr(self.all()))
            assert len(found()) == count
        return found()

    def all(self) -> list[str]:
        return [span.to_json() for span in self._exporter.get_finished_spans()]


@pytest.fixture
def traces(server: EmbeddedServer, names: Names) -> Iterator[Traces]:
    """Runners of this test."""
    with Fleet(server.url, names) as fleet:
        yield Traces(fleet)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def events(span: ReadableSpan) -> list[str]:
    return [str(event.attributes["exception.type"]) for event in span.events if event.attributes]


def assert_child(child: ReadableSpan, parent: ReadableSpan) -> None:
    assert child.parent is not None
    assert child.context is not None
    assert parent.context is not None
    assert child.context.trace_id == parent.context.trace_id
    assert child.parent.span_id == parent.context.span_id


def test_one_trace_leads_from_the_producer_over_a_retry_to_the_end(
    traces: Traces, names: Names
) -> None:
    """A span for each attempt, all under the dispatch; what a task does is under its attempt."""

    def body(payload: Any) -> None:
        with traces.tracer.start_as_current_span("inside"):
            pass
        if len(traces.spans("process flaky")) == 0:
            raise ValueError("not yet")

    flaky = traces.fleet.task(body, name="flaky", max_retry=3, retry_delay=0.05)
    runner = traces.runner()
    with traces.tracer.start_as_current_span("request") as request:
        sent = flaky.delay({"key": SECRET})
    with runner:
        first, second = traces.spans("process flaky", 2)
    (producer,) = traces.spans("send flaky", 1)

    assert producer.parent is not None
    assert producer.parent.span_id == request.get_span_context().span_id
    assert producer.kind is SpanKind.PRODUCER
    assert attributes(producer) == {
        "messaging.system": "redis",
        "messaging.destination.name": names.stream,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.message.id": sent.id,
        "taskrunner.task.name": "flaky",
        "taskrunner.delayed": False,
    }
    for attempt in (first, second):
        assert_child(attempt, producer)
        assert attempt.kind is SpanKind.CONSUMER
    assert attributes(first) == {
        "messaging.system": "redis",
        "messaging.destination.name": names.stream,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": sent.id,
        "messaging.consumer.group.name": names.group,
        "messaging.client.id": runner.host,
        "taskrunner.task.name": "flaky",
        "taskrunner.attempt": 1,
        "taskrunner.outcome": "retry",
        "error.type": "builtins.ValueError",
    }
    assert first.status.status_code is StatusCode.ERROR
    assert events(first) == ["ValueError"]
    assert attributes(second)["taskrunner.attempt"] == 2
    assert attributes(second)["taskrunner.outcome"] == "succeeded"
    assert second.status.status_code is StatusCode.UNSET
    assert not second.events
    inside = traces.spans("inside", 2)
    for child, attempt in zip(inside, (first, second), strict=True):
        assert_child(child, attempt)
    assert not [text for text in traces.all() if SECRET in text]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"run_in": 0.1}, id="delayed"),
        pytest.param({}, id="a retry in the delayed set"),
    ],
)
def test_the_trace_goes_through_the_delayed_set(traces: Traces, options: dict[str, Any]) -> None:
    """The leader moves a message with all its keys."""
    seen: list[int] = []

    def body(payload: Any) -> None:
        seen.append(payload)
        if len(seen) == 1:
            raise Retry(0.2)

    # With reclaim_delay below the wait, a retry waits in the delayed set.
    made = traces.fleet.task(body, name="waits", max_retry=2)
    with traces.runner(queue={"reclaim_delay": 0.15}):
        made.delay(1, **options)
        attempts = traces.spans("process waits", 2)
    (producer,) = traces.spans("send waits", 1)

    for attempt in attempts:
        assert_child(attempt, producer)
    assert attributes(producer)["taskrunner.delayed"] is bool(options)
    first = attempts[0]
    assert attributes(first)["taskrunner.outcome"] == "retry"
    assert first.status.status_code is StatusCode.UNSET  # it asked for another try: no error
    assert not first.events


def test_many_are_one_span_and_all_of_them_in_its_trace(traces: Traces) -> None:
    """One call, one span, with the number of messages."""
    with traces.runner():
        traces.fleet.note.delay_many(range(5))
        traces.fleet.note.delay_many([5, 6], run_in=0.05)
        attempts = traces.spans("process note", 7)
    now, later = traces.spans("send note", 2)

    assert attributes(now)["messaging.batch.message_count"] == 5
    assert attributes(later)["messaging.batch.message_count"] == 2
    assert attributes(later)["taskrunner.delayed"] is True
    assert now.context is not None
    ours = [one for one in attempts if one.context and one.context.trace_id == now.context.trace_id]
    assert len(ours) == 5


def test_ends_are_told_apart(traces: Traces) -> None:
    """Rejected, failed, or a duplicate that was not sent."""

    def reject(payload: Any) -> None:
        raise Reject("no")

    def fail(payload: Any) -> None:
        raise SystemExit(3)

    rejected = traces.fleet.task(reject, name="rejected", max_retry=5)
    failed = traces.fleet.task(fail, name="failed")
    unique = traces.fleet.task(name="unique", unique_for=60)
    unique.delay(1)
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay(1)
    with traces.runner():
        rejected.delay(1)
        failed.delay(1)
        (one,) = traces.spans("process rejected", 1)
        (other,) = traces.spans("process failed", 1)
    _, duplicate = traces.spans("send unique", 2)

    assert attributes(one)["taskrunner.outcome"] == "rejected"
    assert [name.rpartition(".")[2] for name in events(one)] == ["Reject"]
    assert attributes(other)["taskrunner.outcome"] == "failed"
    assert attributes(other)["error.type"] == "builtins.SystemExit"
    assert other.status.status_code is StatusCode.ERROR
    assert attributes(duplicate)["taskrunner.duplicate"] is True
    assert duplicate.status.status_code is StatusCode.UNSET


def test_a_dispatch_that_fails_is_an_error(traces: Traces) -> None:
    """The span tells it, the caller gets the exception as ever."""
    with pytest.raises(ValueError, match="payload"):
        traces.fleet.note.delay({"created": object()})
    (span,) = traces.spans("send note", 1)
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "taskrunner.errors.InvalidTaskPayloadError"


def test_hooks_and_baggage_are_inside_the_span(traces: Traces) -> None:
    """A hook can put attributes on the attempt; what the propagators carry comes along."""
    found: list[Any] = []

    def before(_: Any) -> None:
        trace.get_current_span().set_attribute("mine", "yes")

    def body(payload: Any) -> None:
        found.append(baggage.get_baggage("tenant"))

    made = traces.fleet.task(body, name="tenant")
    token = context.attach(baggage.set_baggage("tenant", 'blue, and "quoted"'))
    try:
        made.delay(1)
    finally:
        context.detach(token)
    with traces.runner(before_task=before):
        (span,) = traces.spans("process tenant", 1)
    assert attributes(span)["mine"] == "yes"
    assert found == ['blue, and "quoted"']
    assert baggage.get_baggage("tenant") is None


def test_the_context_lies_beside_the_fields_where_go_overlooks_it(traces: Traces) -> None:
    """`traceparent` after the seven fields; a message without one starts a trace of its own."""
    traces.fleet.note.delay(1)
    (body,) = traces.fleet.bodies()
    keys = [key for key, _ in members(body.decode())]
    assert keys[:7] == [
        *("unique", "unique_for", "unique_key", "unique_lock_value"),
        *("reservation_timeout", "task_name", "payload"),
    ]
    assert keys[-1] == "traceparent"

    odd = '{"task_name":"note","payload":{"traceparent":"00-a"},"traceparent":7}'
    traces.fleet.producer.queue.add(odd)
    traces.fleet.producer.queue.add('{"task_name":"note","payload":2}')
    with traces.runner():
        spans = traces.spans("process note", 3)
    assert len({span.context.trace_id for span in spans if span.context}) == 3
    assert len([span for span in spans if span.parent is None]) == 2


def test_nothing_is_imported_unless_asked_for() -> None:
    """And without the API the error names the extra."""
    program = """
        import sys
        import redis  # takes opentelemetry itself, where it is there
        before = set(sys.modules)
        import taskrunner, taskrunner.cli
        new = set(sys.modules) - before
        assert not [name for name in new if name.startswith(("opentelemetry", "prometheus"))]
        for name in ("opentelemetry", "prometheus_client"):
            sys.modules[name] = None
        for name in ("otel", "prometheus"):
            try:
                __import__(f"taskrunner.{name}")
            except ImportError as error:
                assert f"pip install 'redis-taskrunner[{name}]'" in str(error), error
            else:
                raise AssertionError(name)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, cwd=ROOT)


def test_a_task_is_dispatched_by_the_traced_runner(traces: Traces) -> None:
    """`Task.delay` and `TaskRunner.dispatch` go the same way."""
    made: Task[Any] = traces.fleet.note
    made.delay(1)
    traces.fleet.producer.dispatch("note", 2)
    assert len(traces.spans("send note", 2)) == 2
