"""Parent side: medians, ratios and tables from the measurements of a run."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.workloads import WORKLOADS, Metric, Workload

BASE = "raw"
OWN = (BASE, "taskrunner")


@dataclass(frozen=True)
class Value:
    """One figure over the repeats of a run."""

    median: float
    least: float
    most: float

    def text(self, metric: Metric) -> str:
        """The median, with the range where there is one."""
        digits = metric.digits
        middle = f"{self.median:,.{digits}f}"
        if self.least == self.most:
            return middle
        return f"{middle} ({self.least:,.{digits}f} to {self.most:,.{digits}f})"


Results = Mapping[str, Mapping[str, Mapping[str, Value]]]
"""workload -> system -> figure -> value."""


def collect(lines: Iterable[Mapping[str, Any]]) -> Results:
    """The measurements of a run, by workload, system and figure."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for line in lines:
        figures = found[line["workload"]][line["system"]]  # none where the system has no such thing
        for name, value in line.get("figures", {}).items():
            figures[name].append(value)
    return {
        workload: {
            system: {
                name: Value(median(values), min(values), max(values))
                for name, values in figures.items()
            }
            for system, figures in systems.items()
        }
        for workload, systems in found.items()
    }


def ratio(value: Value | None, base: Value | None) -> str:
    """A figure as a multiple of another's."""
    if value is None or base is None or base.median == 0:
        return ""
    return f"{value.median / base.median:.2f}"


def survivors(results: Results) -> set[str]:
    """The systems that lost nothing when a worker was killed."""
    kills = results.get("kill", {})
    return {
        system for system, found in kills.items() if "lost" in found and found["lost"].most == 0
    }


def best(metric: Metric, systems: Mapping[str, Mapping[str, Value]], among: set[str]) -> str | None:
    """The peer with the best median of those."""
    found = {
        name: values[metric.name].median
        for name, values in systems.items()
        if name in among and name not in OWN and metric.name in values
    }
    if not found:
        return None
    return (max if metric.better == "more" else min)(found, key=lambda name: found[name])


def table(
    workload: Workload, systems: Mapping[str, Mapping[str, Value]], results: Results
) -> list[list[str]]:
    """Rows of one workload, the first of titles: each figure, its ratio to the raw limit, and that
    of the first one to the best peer that survives a kill."""
    base = systems.get(BASE, {})
    alive = survivors(results)
    metrics = [m for m in workload.metrics if any(m.name in found for found in systems.values())]
    titles = ["system"]
    for metric in metrics:
        titles.append(metric.title)
        if metric.name in base:
            titles.append("/ raw")
    first = metrics[0]
    peer = None if workload.name == "kill" else best(first, systems, alive)
    if peer is not None:
        titles.insert(2 + (first.name in base), f"/ {peer}")
    tested = workload.name != "kill" and "kill" in results
    if tested:
        titles.append("survives kill -9")
    rows = [titles]
    for system, found in systems.items():
        if not found:
            continue
        row = [system]
        for metric in metrics:
            value = found.get(metric.name)
            row.append(value.text(metric) if value else "")
            if metric.name in base:
                row.append(ratio(value, base[metric.name]))
            if metric is first and peer is not None:
                row.append(ratio(value, systems[peer][metric.name]))
        if tested:
            row.append("" if system == BASE else "yes" if system in alive else "no")
        rows.append(row)
    return rows


def render(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table whose columns line up."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = "|" + "|".join(
        "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)
    )
    return "\n".join([lines[0], rule + "|", *lines[1:]])


def tables(results: Results) -> str:
    """One titled table per workload that was measured."""
    parts = []
    for workload in WORKLOADS:
        systems = results.get(workload.name, {})
        if any(systems.values()):
            parts.append(f"### {workload.title}\n\n{render(table(workload, systems, results))}")
            if none := [system for system, found in systems.items() if not found]:
                parts.append(f"No such thing, or not within the time: {', '.join(none)}.")
    return "\n\n".join(parts)
