"""Floor 5: traces with OpenTelemetry; needs the extra `otel`.

    from taskrunner import otel

    otel.instrument(runner)            # in every process that dispatches or runs tasks

A dispatch is a producer span, each attempt a consumer span in the same trace: its context travels
in the message, beside its fields. Payloads are in no span. docs/observability.md has the details.
"""

# An extra: the rest is checked without it, too.
# pyright: reportMissingImports=false

import json
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from datetime import datetime
from typing import Any, Final, TypeVar

from taskrunner.clock import Duration
from taskrunner.context import TaskContext
from taskrunner.errors import InvalidTaskPayloadError, Retry, TaskAlreadyDispatchedError
from taskrunner.message import members
from taskrunner.observer import Observer, Sender
from taskrunner.retry import outcome
from taskrunner.runner import TaskRunner
from taskrunner.task import Dispatched, Task

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as error:
    raise ImportError(
        "traces need opentelemetry-api: pip install 'redis-taskrunner[otel]'"
    ) from error

T = TypeVar("T")

# Names of the messaging conventions, which the API itself has no constants for.
_SYSTEM: Final = "messaging.system"
_DESTINATION: Final = "messaging.destination.name"
_OPERATION: Final = "messaging.operation.name"
_OPERATION_TYPE: Final = "messaging.operation.type"
_MESSAGE_ID: Final = "messaging.message.id"
_BATCH: Final = "messaging.batch.message_count"
_GROUP: Final = "messaging.consumer.group.name"
_CLIENT: Final = "messaging.client.id"
_ERROR_TYPE: Final = "error.type"
_TASK: Final = "taskrunner.task.name"
_ATTEMPT: Final = "taskrunner.attempt"
_OUTCOME: Final = "taskrunner.outcome"
_DELAYED: Final = "taskrunner.delayed"
_DUPLICATE: Final = "taskrunner.duplicate"


def instrument(runner: TaskRunner, tracer_provider: TracerProvider | None = None) -> None:
    """Have a runner's dispatches and attempts traced; by the global tracer provider, if none is
    given.

    Raises AlreadyStartedError while the runner runs.
    """
    runner.observe(_Tracing(runner, tracer_provider))


class _Tracing(Observer):
    """Spans of one runner."""

    def __init__(self, runner: TaskRunner, tracer_provider: TracerProvider | None) -> None:
        self._runner = runner
        self._tracer = trace.get_tracer("taskrunner", tracer_provider=tracer_provider)
        self._running: ContextVar[tuple[Span, Token[Any]]] = ContextVar("taskrunner.otel.running")

    def sender(self, sender: Sender) -> Sender:
        return _TracedSender(sender, self._tracer, self._runner.queue.stream)

    def started(self, context: TaskContext) -> None:
        parent = propagate.extract(_carried(context.message.raw))
        span = self._tracer.start_span(
            f"process {context.name}",
            parent,
            SpanKind.CONSUMER,
            {
                **_common("process", context.name, self._runner.queue.stream),
                _MESSAGE_ID: context.id,
                _GROUP: self._runner.config.consumer_group,
                _CLIENT: self._runner.host,
                _ATTEMPT: context.attempt,
            },
        )
        self._running.set((span, contexts.attach(trace.set_span_in_context(span, parent))))

    def ended(self, context: TaskContext, error: BaseException | None) -> None:
        span, token = self._running.get()
        try:
            end = outcome(error, context.attempt, context.max_retry)
            span.set_attribute(_OUTCOME, "lost" if error and context.lost else end)
            asked_again = end == "retry" and issubclass(type(error), Retry)
            if error is not None and not asked_again:
                _record(span, error)
        finally:
            contexts.detach(token)
            span.end()


class _TracedSender:
    """Makes a span of every dispatch, and has its context travel in the message."""

    def __init__(self, inner: Sender, tracer: trace.Tracer, stream: str) -> None:
        self._inner = inner
        self._tracer = tracer
        self._stream = stream
        self.unlock = inner.unlock

    def dispatch(
        self,
        task: Task[Any],
        payload: Any,
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> Dispatched:
        def send(span: Span, carried: Mapping[str, str]) -> Dispatched:
            sent = self._inner.dispatch(
                task, payload, run_at=run_at, run_in=run_in, extra={**(extra or {}), **carried}
            )
            span.set_attribute(_MESSAGE_ID, sent.id)
            span.set_attribute(_DELAYED, sent.run_at is not None)
            return sent

        return self._traced(task, send)

    def dispatch_many(
        self,
        task: Task[Any],
        payloads: Iterable[Any],
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> list[Dispatched | None]:
        def send(span: Span, carried: Mapping[str, str]) -> list[Dispatched | None]:
            sent = self._inner.dispatch_many(
                task, payloads, run_at=run_at, run_in=run_in, extra={**(extra or {}), **carried}
            )
            span.set_attribute(_BATCH, len(sent))
            span.set_attribute(_DELAYED, any(one and one.run_at is not None for one in sent))
            return sent

        return self._traced(task, send)

    def _traced(self, task: Task[Any], send: Callable[[Span, Mapping[str, str]], T]) -> T:
        with self._tracer.start_as_current_span(
            f"send {task.name}",
            kind=SpanKind.PRODUCER,
            attributes=_common("send", task.name, self._stream),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            carried: dict[str, str] = {}
            propagate.inject(carried)
            try:
                return send(span, carried)
            except TaskAlreadyDispatchedError:  # what uniqueness is there for
                span.set_attribute(_DUPLICATE, True)
                raise
            except BaseException as error:
                _record(span, error)
                raise


def _common(operation: str, task_name: str, stream: str) -> dict[str, str]:
    return {
        _SYSTEM: "redis",
        _DESTINATION: stream,
        _OPERATION: operation,
        _OPERATION_TYPE: operation,
        _TASK: task_name,
    }


def _record(span: Span, error: BaseException) -> None:
    kind = type(error)
    span.set_attribute(_ERROR_TYPE, f"{kind.__module__}.{kind.__qualname__}")
    span.set_status(Status(StatusCode.ERROR, kind.__qualname__))
    span.record_exception(error)


def _carried(text: str) -> dict[str, str]:
    """The keys of a message that the propagators have put there."""
    wanted = {field for field in propagate.get_global_textmap().fields if f'"{field}"' in text}
    if not wanted:
        return {}
    try:
        found = {key: value for key, value in members(text) if key in wanted}
    except InvalidTaskPayloadError:  # it was read, but by more lenient rules
        return {}
    values = {key: json.loads(value) for key, value in found.items()}
    return {key: value for key, value in values.items() if isinstance(value, str)}
