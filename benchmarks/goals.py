"""Parent side: what was to be reached, and whether a run reached it.

Rates and times are medians of the run; CPU and imports are the least of the repeats, for whatever
else runs on the machine only adds to them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.report import Results, Value, best, render, survivors
from benchmarks.workloads import WORKLOADS

_METRICS: Final = {
    (workload.name, metric.name): metric for workload in WORKLOADS for metric in workload.metrics
}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One line: a figure of the run, what it must be, and what it would ideally be."""

    title: str
    better: Literal["more", "less"]
    must: float
    stretch: float | None = None
    unit: str = ""
    digits: int = 2
    figure: Callable[[Results], float | None]

    def row(self, results: Results) -> list[str]:
        """Its cells; "not measured" where the run lacks a part."""
        value = self.figure(results)
        sign = "≥" if self.better == "more" else "≤"
        stretch = "" if self.stretch is None else f"{sign} {self.stretch:g}{self.unit}"
        cells = [self.title, f"{sign} {self.must:g}{self.unit}", stretch]
        if value is None:
            return [*cells, "not measured", ""]
        reached = "yes" if self._meets(value, self.must) else "**no**"
        if self.stretch is not None and self._meets(value, self.stretch):
            reached = "yes, stretch"
        return [*cells, f"{value:.{self.digits}f}{self.unit}", reached]

    def _meets(self, value: float, goal: float) -> bool:
        return value >= goal if self.better == "more" else value <= goal


def _value(results: Results, workload: str, name: str, system: str) -> Value | None:
    return results.get(workload, {}).get(system, {}).get(name)


def _own(
    workload: str, name: str, which: Literal["median", "least", "most"] = "median"
) -> Callable[[Results], float | None]:
    def figure(results: Results) -> float | None:
        value = _value(results, workload, name, "taskrunner")
        return None if value is None else float(getattr(value, which))

    return figure


def _to_raw(
    workload: str,
    name: str,
    which: Literal["median", "least"] = "median",
    *,
    turned: bool = False,
) -> Callable[[Results], float | None]:
    """TaskRunner's figure as a multiple of raw's; `turned`: raw's as one of TaskRunner's."""

    def figure(results: Results) -> float | None:
        ours = _value(results, workload, name, "taskrunner")
        raw = _value(results, workload, name, "raw")
        if ours is None or raw is None:
            return None
        one, other = (raw, ours) if turned else (ours, raw)
        return float(getattr(one, which) / getattr(other, which))

    return figure


def _to_best(workload: str, name: str) -> Callable[[Results], float | None]:
    """As a multiple of the best peer's that lost nothing when it was killed."""

    def figure(results: Results) -> float | None:
        systems = results.get(workload, {})
        peer = best(_METRICS[workload, name], systems, survivors(results))
        ours = _value(results, workload, name, "taskrunner")
        if peer is None or ours is None:
            return None
        return ours.median / systems[peer][name].median

    return figure


def _resident(results: Results) -> float | None:
    ours = _value(results, "drain", "resident", "taskrunner")
    raw = _value(results, "drain", "resident", "raw")
    return None if ours is None or raw is None else ours.median - raw.median


def _backlog(results: Results) -> float | None:
    large = _value(results, "grow-drain", "at_1000000", "taskrunner")
    small = _value(results, "grow-drain", "at_20000", "taskrunner")
    return None if large is None or small is None else large.median / small.median


def _goal(
    title: str,
    better: Literal["more", "less"],
    must: float,
    stretch: float | None,
    figure: Callable[[Results], float | None],
    *,
    unit: str = " ×",  # noqa: RUF001 - meant
    digits: int = 2,
) -> Goal:
    return Goal(
        title=title, better=better, must=must, stretch=stretch, figure=figure, unit=unit, digits=digits
    )  # fmt: skip


GOALS: Final = (
    _goal("drain, no-op, 8 workers, against raw", "more", 0.5, 0.75, _to_raw("drain", "rate")),
    _goal(
        "the same against the best surviving peer", "more", 10, None, _to_best("drain", "rate"),
        digits=1,
    ),
    _goal(
        "CPU per 1000 tasks against raw (least of both)", "less", 3, 2.3,
        _to_raw("drain", "cpu", "least"),
    ),
    _goal(
        "commands per task, drain", "less", 0.05, 0.03, _own("drain", "commands"), unit="", digits=3
    ),
    _goal("commands per task, io", "less", 0.3, 0.15, _own("io", "commands"), unit="", digits=3),
    _goal("enqueue one by one against raw", "more", 0.9, 1, _to_raw("enqueue", "rate")),
    _goal("enqueue in bulk against raw pipelined", "more", 0.5, 0.7, _to_raw("drain", "bulk")),
    _goal("latency p50 against the best peer", "less", 1.2, 1, _to_best("latency", "p50")),
    _goal("latency p99 against the best peer", "less", 1.2, 1, _to_best("latency", "p99")),
    _goal("io wall against ideal", "less", 1.06, 1.03, _own("io", "ideal"), digits=3),
    _goal("lateness of delayed tasks, p99", "less", 20, 5, _own("delayed", "p99"), unit=" ms"),
    _goal(
        "delayed tasks that ran early", "less", 0, None, _own("delayed", "early", "most"), unit="",
        digits=0,
    ),
    _goal(
        "lateness of a retry parked for 0.5 s, p99", "less", 50, 10, _own("retry", "p99"),
        unit=" ms",
    ),
    _goal(
        "resident memory after the drain, above raw", "less", 10, 6, _resident, unit=" MiB",
        digits=1,
    ),
    _goal(
        "import of TaskRunner and task against `import redis` (least of both)", "less", 1.15, 1.08,
        _to_raw("import", "import", "least"),
    ),
    _goal(
        "cpu tasks, 1 process, against the bare loop (least CPU of both)", "more", 0.9, 0.95,
        _to_raw("cpu", "cpu", "least", turned=True),
    ),
    _goal("drain at 1,000,000 waiting against 20,000", "more", 0.9, None, _backlog),
    _goal(
        "2 processes against 1, cpu tasks, 2 cores", "more", 1.8, None,
        _own("grow-processes", "gain_2"),
    ),
)  # fmt: skip


def goals(results: Results) -> str:
    """The table of goals for a run."""
    titles = ["figure", "must", "stretch", "measured", "reached"]
    return render([titles, *(goal.row(results) for goal in GOALS)])
