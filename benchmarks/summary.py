"""Tables and a chart from the files of one or more runs.

`python -m benchmarks.summary a.jsonl b.jsonl` prints the goals and the tables. `--docs` puts them
into docs/performance.md; `--chart` draws docs/images/performance.png, which needs matplotlib, from
the bench extra. Files of the same run may be many: a ratio is always taken within one workload, so
each workload must come from one run.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goals import goals
from benchmarks.report import BASE, Value, collect, survivors, tables

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "performance.png"

_Systems = Mapping[str, Mapping[str, Value]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--chart", type=Path, nargs="?", const=PICTURE, help="draw it there")
    parser.add_argument("--docs", action="store_true", help="renew docs/performance.md")
    given = parser.parse_args(arguments)
    pyplot = _pyplot() if given.chart else None  # says what is missing before anything else
    lines = [json.loads(line) for file in given.files for line in file.read_text().splitlines()]
    headers = [line for line in lines if "machine" in line]
    for header in headers:
        print(json.dumps(header, indent=2))
    results = collect(line for line in lines if "workload" in line)
    print(f"{goals(results)}\n\n{tables(results)}")
    if given.docs:
        _renew("goals", goals(results))
        _renew("machine", "\n\n".join(map(_machine, headers)))
        _renew("tables", tables(results))
        print(PAGE)
    if pyplot is not None:
        _draw(pyplot, results, survivors(results), given.chart)
        print(given.chart)


def _renew(part: str, text: str) -> None:
    """Replace what stands in the page between the marks of that part."""
    begin, end = f"<!-- {part}: written by benchmarks.summary -->", f"<!-- end of {part} -->"
    page = PAGE.read_text()
    pattern = f"{re.escape(begin)}.*{re.escape(end)}"
    found = re.sub(pattern, lambda _: f"{begin}\n\n{text}\n\n{end}", page, flags=re.DOTALL)
    if begin not in page or end not in page:
        raise SystemExit(f"{PAGE} has no marks for {part}")
    PAGE.write_text(found)


def _machine(header: Mapping[str, Any]) -> str:
    """Where and with what a run was made."""
    libraries = ", ".join(f"{name} {version}" for name, version in header["libraries"].items())
    lines = [
        f"{header.get('date', '')}: {header['machine']}, Python {header['python']}, "
        f"{header['server']}, {libraries}; load average before the run {header['load_before']}, "
        f"{header['repeats']} repeats."
    ]
    peers = [f"- {name}: {with_}" for name, with_ in header["peers"].items()]
    return "\n".join([*lines, "", *peers] if peers else lines)


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
