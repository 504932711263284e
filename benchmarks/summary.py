"""Tables and a chart from the files of one or more runs.

`python -m benchmarks.summary a.jsonl b.jsonl` prints the tables; `--chart` draws
docs/images/performance.png too, which needs matplotlib, from the bench extra. Files of the same run
may be many: a ratio is always taken within one workload, so each workload must come from one run.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import BASE, Value, collect, survivors, tables

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "performance.png"

_Systems = Mapping[str, Mapping[str, Value]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--chart", type=Path, nargs="?", const=PICTURE, help="draw it there")
    given = parser.parse_args(arguments)
    pyplot = _pyplot() if given.chart else None  # says what is missing before anything else
    lines = [json.loads(line) for file in given.files for line in file.read_text().splitlines()]
    for line in lines:
        if "machine" in line:
            print(json.dumps(line, indent=2))
    results = collect(line for line in lines if "workload" in line)
    print(tables(results))
    if pyplot is not None:
        _draw(pyplot, results, survivors(results), given.chart)
        print(given.chart)


def _draw(pyplot: Any, results: Mapping[str, _Systems], alive: set[str], output: Path) -> None:
    """Four bars charts, longest bars on top where more is better, shortest where less is."""
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    panels = (
        ("drain", "rate", "no-op tasks a second, 8 workers", True),
        ("drain", "cpu", "CPU seconds per 1000 tasks (less is better)", False),
        ("enqueue", "rate", "dispatches a second, one by one", True),
        ("latency", "p50", "ms from call to run, median; whisker: p99 (less is better)", False),
    )
    for axis, (workload, name, title, more) in zip(axes.flat, panels, strict=True):
        _bars(axis, results.get(workload, {}), name, alive, more=more)
        axis.set_title(title, fontsize=10)
    figure.suptitle(
        "log scales; hatched: lost tasks when a worker was killed; grey: bare redis-py, the limit",
        fontsize=10,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def _bars(axis: Any, systems: _Systems, name: str, alive: set[str], *, more: bool) -> None:
    found = {system: figures[name] for system, figures in systems.items() if name in figures}
    order = sorted(found, key=lambda system: found[system].median, reverse=not more)
    colors = {BASE: "lightgrey", "taskrunner": "tab:green"}
    for at, system in enumerate(order):
        value = found[system]
        low, high = value.least, value.most
        if name == "p50":
            low, high = value.median, systems[system]["p99"].median
        axis.barh(
            at,
            value.median,
            xerr=[[value.median - low], [high - value.median]],
            color=colors.get(system, "tab:blue"),
            hatch="" if system in alive or system == BASE else "///",
            edgecolor="white",
            error_kw={"elinewidth": 1, "ecolor": "black"},
        )
        digits = 0 if value.median >= 100 else 2 if value.median >= 0.1 else 4
        axis.annotate(f" {value.median:,.{digits}f}", (high, at), va="center", fontsize=8)
    axis.set_yticks(range(len(order)), order)
    axis.set_xscale("log")
    axis.margins(x=0.2)
    axis.tick_params(axis="x", which="minor", labelbottom=False)
    axis.set_xlim(left=min((value.median for value in found.values()), default=1.0) / 4)
    axis.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "drawing needs matplotlib, which the bench extra brings: "
            "pip install 'redis-taskrunner[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


if __name__ == "__main__":
    main()
