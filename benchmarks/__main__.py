"""`python -m benchmarks`: measure, write every measurement to a file, print the tables."""

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from benchmarks.goals import goals
from benchmarks.harness import Bench, ChildError
from benchmarks.peers import PACKAGES, prepare, versions
from benchmarks.report import OWN, collect, tables
from benchmarks.workloads import WORKLOADS, Workload


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _options(arguments)
    named = {"own": OWN, "all": (*OWN, *PACKAGES)}
    systems = list(named.get(options.systems, options.systems.split(",")))
    if unknown := set(systems) - set(named["all"]):
        print(f"no system {', '.join(sorted(unknown))}; there are {', '.join(named['all'])}")
        return 2
    names = [workload.name for workload in WORKLOADS]
    wanted = names if options.workloads == "all" else options.workloads.split(",")
    if unknown := set(wanted) - set(names):
        print(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return 2
    pythons = prepare(systems)
    lines: list[dict[str, Any]] = []
    with Bench(pythons) as bench, _output(options.out) as out:
        lines.append(_header(bench, pythons, options.repeats))
        _write(out, lines[0])
        for workload in WORKLOADS:
            if workload.name in wanted:
                for line in _measure(bench, workload, systems, options):
                    lines.append(line)
                    _write(out, line)
    print(json.dumps(lines[0], indent=2))
    results = collect(line for line in lines if "workload" in line)
    print(f"\n{goals(results)}\n\n{tables(results)}")
    return 1 if any("error" in line for line in lines) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--systems", default="own", help="names with commas, own, or all (default: own)"
    )
    parser.add_argument("--workloads", default="all", help="names with commas (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (default 3)")
    parser.add_argument(
        "--own-repeats", type=int, default=0, help="of raw and taskrunner where all are compared"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of tasks")
    parser.add_argument("--out", type=Path, help="write each measurement there, a JSON line each")
    return parser.parse_args(arguments)


def _measure(
    bench: Bench, workload: Workload, systems: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All systems in turn, again and again, each time beginning with another one."""
    chosen = [
        system
        for system in systems
        if system not in workload.not_for and (not workload.only_for or system in workload.only_for)
    ]

    def measure(system: str, repeat: int) -> dict[str, Any]:
        line: dict[str, Any] = {"workload": workload.name, "system": system, "repeat": repeat}
        start = time.monotonic()
        try:
            line["figures"] = workload.measure(bench, system, options.scale)
        except ChildError as error:
            line["error"] = str(error)
            print(f"\n{error}", file=sys.stderr)
        line["took"] = round(time.monotonic() - start, 3)
        print(".", end="", file=sys.stderr, flush=True)
        return line

    lines: list[dict[str, Any]] = []
    if workload.together and chosen:
        bench.clear()
        with ThreadPoolExecutor(len(chosen)) as threads:
            lines += threads.map(lambda system: measure(system, 0), chosen)
    else:
        compares = not (workload.once or workload.only_for)
        repeats = 1 if workload.once else options.repeats
        if compares:
            repeats = max(repeats, options.own_repeats)
        for repeat in range(repeats):
            turn = [s for s in chosen if repeat < options.repeats or s in OWN]
            at = repeat % len(turn) if turn else 0
            for system in turn[at:] + turn[:at]:
                bench.clear()
                lines.append(measure(system, repeat))
    print(f" {workload.name}", file=sys.stderr)
    order = {system: i for i, system in enumerate(systems)}
    return sorted(lines, key=lambda line: (order[line["system"]], line["repeat"]))


def _header(bench: Bench, pythons: Mapping[str, Path], repeats: int) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "server": bench.server_version,
        "load_before": round(os.getloadavg()[0], 2),
        "libraries": {
            name: version(name)
            for name in ("redis", "hiredis", "msgspec")  # the last is an extra
            if find_spec(name)
        },
        "peers": {
            name: versions(name, python) for name, python in pythons.items() if name in PACKAGES
        },
        "systems": list(pythons),
        "repeats": repeats,
        "spin_loops": bench.loops,
    }


def _output(path: Path | None) -> TextIO:
    return open(path if path is not None else os.devnull, "w")


def _write(out: TextIO, line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
