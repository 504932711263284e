"""`python -m tests.chaos_run --seconds 60 --seed 1`: 0 if every promise was kept, else 1."""

import argparse
import hashlib
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Final

from tests.chaos_run.checks import Report
from tests.chaos_run.run import Chaos
from tests.chaos_run.schedule import draw

_RATE: Final = 40.0
_TAIL: Final = 30  # lines
_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def main() -> int:
    """Run, and say what came of it."""
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--instances", type=int, default=None, help="3 to 5; default: by the seed")
    parser.add_argument(
        "--rate", type=float, default=_RATE, help="messages a second, all producers"
    )
    parser.add_argument("--show", action="store_true", help="print the schedule and do nothing")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    instances = options.instances or 3 + seed % 3
    faults = draw(seed, options.seconds, instances)
    mark = hashlib.sha256(repr(faults).encode()).hexdigest()[:12]
    print(
        f"seed {seed}: {len(faults)} faults (schedule {mark}) against {instances} instances",
        flush=True,
    )
    if options.show:
        for fault in faults:
            print(fault)
        return 0
    signal.signal(signal.SIGTERM, _interrupted)
    directory = Path(tempfile.mkdtemp(prefix="taskrunner-chaos-"))
    again = f"make chaos SECONDS={options.seconds:g} SEED={seed}"
    if options.instances or options.rate != _RATE:
        again += f" CHAOS_ARGS='--instances {instances} --rate {options.rate:g}'"
    try:
        with Chaos(directory, seed=seed, instances=instances, rate=options.rate) as chaos:
            chaos.start()
            chaos.play(faults, options.seconds)
            began = time.monotonic()
            left = chaos.drain(60 + options.seconds / 10)
            print(f"drained in {time.monotonic() - began:.1f} s; faults: {dict(chaos.seen.done)}")
            report = Report(chaos, left)
    except Exception:
        _tell_logs(directory, "")
        print(f"the run itself failed; the same faults again: {again}", flush=True)
        raise
    for name, value in report.figures.items():
        print(f"  {name}: {value}")
    for finding in report.findings[:50]:
        print(f"FOUND {finding}")
    if report.findings:
        _tell_logs(directory, " ".join(report.findings))
        print(f"{len(report.findings)} findings; logs and ledger are in {directory}")
        print(f"the same faults again: {again}")
        return 1
    shutil.rmtree(directory)
    print("every promise was kept")
    return 0


def _tell_logs(directory: Path, findings: str) -> None:
    """The end of each process's log, and before it the lines about what was found, for a reader who
    can't look into the directory."""
    messages = set(re.findall(_UUID, findings))
    for log in sorted(directory.glob("**/*.log")):
        lines = log.read_text(errors="replace").splitlines()
        about = [line for line in lines[:-_TAIL] if messages & set(re.findall(_UUID, line))]
        print(f"--- {log.relative_to(directory)} ---")
        print("\n".join([*about[:_TAIL], "...", *lines[-_TAIL:]]))


def _interrupted(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
