"""Floor 5: a runner's figures for Prometheus; needs the extra `prometheus`.

    from prometheus_client import start_http_server
    from taskrunner import prometheus

    prometheus.instrument(runner)      # before runner.run_forever()
    start_http_server(9100)

`taskrunner worker --metrics-port` does the same, and adds the figures of all its processes. What
each metric means is in docs/observability.md.
"""

# An extra: the rest is checked without it, too.
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from taskrunner.clock import now
from taskrunner.group_figures import GroupFigures, GroupReader
from taskrunner.runner import TaskRunner
from taskrunner.tally import (
    ATTEMPTS,
    BOUNDS,
    DURATION,
    ERRORS,
    FAILURES,
    LATENESS,
    NOW,
    OTHER,
    PROCESS,
    QUEUE_WAIT,
    RECLAIMS,
    RUNNING,
    TIMEOUTS,
    UNKNOWN,
    Cells,
    Key,
    Tally,
)

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "metrics need prometheus-client: pip install 'redis-taskrunner[prometheus]'"
    ) from error

Source: TypeAlias = tuple[Cells, bool]
"""The cells of one process, and whether it lives."""

_COUNTERS: Final = (
    (ATTEMPTS, "attempts", "Attempts that ended, by outcome.", ("task", "outcome")),
    (TIMEOUTS, "attempt_timeouts", "Attempts beyond their time_limit.", ("task",)),
    (FAILURES, "failures", "Messages that failed for good, by reason.", ("task", "reason")),
    (RECLAIMS, "reclaims", "Deliveries taken over from silent consumers.", ()),
    (UNKNOWN, "unknown_tasks", "Messages put back: their task is not registered.", ()),
    (ERRORS, "errors", "Reports of errors, by action.", ("action",)),
)
_HISTOGRAMS: Final = (
    (DURATION, "attempt_duration_seconds", "Run time of attempts, hooks included.", ("task",)),
    (QUEUE_WAIT, "queue_wait_seconds", "Wait in the queue until the first attempt.", ("task",)),
    (LATENESS, "lateness_seconds", "How late what waited for its time went on.", ("waited",)),
)
_PRESENT: Final = (
    ("in_flight", "Messages held: running, buffered, or not settled yet."),
    ("running", "Tasks that run now."),
    ("workers", "Worker threads: how many tasks can run at once."),
    ("unsettled", "Ended attempts that Redis has not been told of yet."),
    ("leader", "1 where the leader of the group is."),
)
_LES: Final = [*(str(bound) for bound in BOUNDS), "+Inf"]


def instrument(runner: TaskRunner, registry: CollectorRegistry = REGISTRY) -> "RunnerCollector":
    """Count what the runner does, and show it in a registry: prometheus_client's own, if none is
    given.

    Raises AlreadyStartedError while the runner runs.
    """
    collector = RunnerCollector(runner)
    registry.register(collector)
    return collector


class RunnerCollector(Collector):
    """A runner's figures, for any `CollectorRegistry`; made before the runner starts.

    Counts begin when it is made. What concerns the whole group is read from Redis on each
    collection, within a second: where Redis does not answer it is left out, and
    `taskrunner_redis_up` is 0.
    """

    def __init__(
        self, runner: TaskRunner, sources: Callable[[], Sequence[Source]] | None = None
    ) -> None:
        self._runner = runner
        self._group = runner.config.consumer_group
        self._reader = GroupReader(runner)
        if sources is None:
            tally = Tally(runner, Cells())

            def own() -> Sequence[Source]:
                tally.sample()
                return [(tally.cells, runner.state in ("started", "stopping"))]

            sources = own
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        """Nothing: so registering asks nobody."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, now."""
        found: dict[Key, list[list[float]]] = {}
        processes = 0
        for cells, lives in self._sources():
            processes += lives
            for key, values in cells.read().items():
                if OTHER in key and not any(values):
                    continue  # most never see one
                if lives or key[0] not in NOW:
                    found.setdefault(key, []).append(values)
        for what, name, text, labels in _COUNTERS:
            yield self._counter(found, what, name, text, labels)
        for what, name, text, labels in _HISTOGRAMS:
            yield self._histogram(found, what, name, text, labels)
        _, *present = (
            [sum(column) for column in zip(*rows, strict=True)]
            if (rows := found.get((PROCESS,)))
            else [0.0] * (1 + len(_PRESENT))
        )
        for (name, text), value in zip(_PRESENT, present, strict=True):
            yield self._gauge(name, text, value)
        yield self._gauge("processes", "Worker processes that run.", processes)
        yield from self._running(found)
        yield from self._of_group(self._reader.figures(), processes, present)

    def _running(self, found: dict[Key, list[list[float]]]) -> Iterator[Metric]:
        labels = ("group", "task")
        count = GaugeMetricFamily("taskrunner_task_running", "Runs of the task now.", labels=labels)
        longest = GaugeMetricFamily(
            "taskrunner_task_longest_run_seconds",
            "How long the task's longest present run has lasted.",
            labels=labels,
        )
        at = now()
        for values, rows in _of(found, RUNNING):
            since = min((since for runs, since in rows if runs), default=at)
            count.add_metric((self._group, *values), sum(runs for runs, _ in rows))
            longest.add_metric((self._group, *values), max(0.0, at - since))
        yield count
        yield longest

    def _of_group(
        self, figures: GroupFigures | None, processes: int, present: Sequence[float]
    ) -> Iterator[Metric]:
        yield self._gauge(
            "redis_up", "Whether Redis answered for this page.", float(figures is not None)
        )
        if figures is None:
            return
        predicted = figures.predicted_wait
        if processes and present[2]:  # a supervisor's own runner does not know its children's pools
            predicted *= figures.hands / (present[2] / processes)
        for name, text, value in (
            ("waiting", "Messages in the queue that nobody has taken.", figures.waiting),
            ("pending", "Messages taken: running, buffered, or parked.", figures.pending),
            ("delayed", "Messages that wait for their time.", figures.delayed),
            ("dead", "Dead letters.", figures.dead),
            ("instances", "Living instances of the group.", figures.instances),
            ("predicted_wait_seconds", "Predicted wait of a message added now.", predicted),
            ("oldest_waiting_seconds", "Age of what nobody has taken.", figures.oldest_waiting),
            ("delayed_overdue_seconds", "Delay of what should be in the queue.", figures.overdue),
        ):
            if value is not None:
                yield self._gauge(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"taskrunner_{name}", text, labels=("group",))
        family.add_metric((self._group,), value)
        return family

    def _counter(
        self,
        found: dict[Key, list[list[float]]],
        what: str,
        name: str,
        text: str,
        labels: Sequence[str],
    ) -> Metric:
        family = CounterMetricFamily(f"taskrunner_{name}", text, labels=("group", *labels))
        for values, rows in _of(found, what):
            family.add_metric((self._group, *values), sum(row[0] for row in rows))
        return family

    def _histogram(
        self,
        found: dict[Key, list[list[float]]],
        what: str,
        name: str,
        text: str,
        labels: Sequence[str],
    ) -> Metric:
        family = HistogramMetricFamily(f"taskrunner_{name}", text, labels=("group", *labels))
        for values, rows in _of(found, what):
            *buckets, total = (sum(column) for column in zip(*rows, strict=True))
            family.add_metric(
                (self._group, *values),
                list(zip(_LES, accumulate(buckets), strict=True)),
                total,
            )
        return family


def _of(
    found: dict[Key, list[list[float]]], what: str
) -> Iterator[tuple[tuple[str, ...], list[list[float]]]]:
    """What was counted of one kind: the values of its labels, and a row for each process."""
    return ((key[1:], rows) for key, rows in found.items() if key[0] == what)
