"""`python -m tests.chaos_run --seconds 60 --seed 1`: 0 if every promise was kept, else 1."""

import argparse
import hashlib
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from tests.chaos_run.checks import Report
from tests.chaos_run.run import Chaos
from tests.chaos_run.schedule import draw


def main() -> int:
    """Run, and say what came of it."""
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--instances", type=int, default=None, help="3 to 5; default: by the seed")
    parser.add_argument("--rate", type=float, default=40, help="messages a second, all producers")
    parser.add_argument("--show", action="store_true", help="print the schedule and do nothing")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    instances = options.instances or 3 + seed % 3
    faults = draw(seed, options.seconds, instances)
    mark = hashlib.sha256(repr(faults).encode()).hexdigest()[:12]
    print(f"seed {seed}: {len(faults)} faults (schedule {mark}) against {instances} instances")
    if options.show:
        for fault in faults:
            print(fault)
        return 0
    signal.signal(signal.SIGTERM, _interrupted)
    directory = Path(tempfile.mkdtemp(prefix="taskrunner-chaos-"))
    with Chaos(directory, seed=seed, instances=instances, rate=options.rate) as chaos:
        chaos.start()
        chaos.play(faults, options.seconds)
        began = time.monotonic()
        left = chaos.drain(60 + options.seconds / 10)
        print(f"drained in {time.monotonic() - began:.1f} s; faults: {dict(chaos.seen.done)}")
        report = Report(chaos, left)
    for name, value in report.figures.items():
        print(f"  {name}: {value}")
    for finding in report.findings[:50]:
        print(f"FOUND {finding}")
    if report.findings:
        print(f"{len(report.findings)} findings; logs and ledger are in {directory}")
        return 1
    shutil.rmtree(directory)
    print("every promise was kept")
    return 0


def _interrupted(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
