"""Child side: `python -m benchmarks.child SPEC`, one producer or one worker.

Talks to its parent in JSON lines: on standard output an event each (`warm`, `done`), on standard
input it waits for the end. What a system's library prints goes to standard error.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from benchmarks.bodies import Marks, cpu_seconds, resident_mib
from benchmarks.systems import Spec, System, Unsupported

SETTLE_SECONDS: Final = 0.2
PAYLOAD: Final = {"user": 123456, "mail": "welcome"}


def main() -> None:
    """Do what the spec says."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    spec = Spec(**json.loads(sys.argv[1]))
    marks = Marks(spec.count, spec.loops, spec.ledger)
    module = importlib.import_module(f"benchmarks.systems.{spec.system}")
    system: System = module.make(spec, marks)
    try:
        if spec.role == "work":
            _work(system, marks, events)
        _tell(events, "done", **_produce(system))
    except Unsupported:
        _tell(events, "done", unsupported=True)
    events.flush()
    os._exit(0)


def _end_with_parent() -> NoReturn:
    sys.stdin.buffer.read()
    os._exit(1)


def _tell(events: Any, event: str, **values: Any) -> None:
    events.write(json.dumps({"event": event, **values}) + "\n")
    events.flush()


# --- the worker ---


def _work(system: System, marks: Marks, events: Any) -> NoReturn:
    spec = system.spec
    watch = threading.Thread(target=_watch, args=(spec, marks, events), daemon=True)
    watch.start()
    system.work(spec.workers)
    watch.join()
    os._exit(0)


def _watch(spec: Spec, marks: Marks, events: Any) -> None:
    """Tell the parent when the first and the last task ran, and end with it."""
    if spec.kind in ("stamp", "due", "fail"):
        marks.warm.wait()
        time.sleep(SETTLE_SECONDS)
        _tell(events, "warm", resident=resident_mib())
    marks.done.wait()
    time.sleep(SETTLE_SECONDS)  # the last settlements leave
    _tell(
        events,
        "done",
        seconds=marks.last_at - marks.first_at,
        cpu=cpu_seconds() - marks.cpu_before,
        resident=resident_mib(),
        first_task=marks.first_at - spec.spawned_at,
        samples=marks.samples,
    )


# --- the producer ---


def _produce(system: System) -> dict[str, float]:
    spec = system.spec
    send_bulk = system.send_bulk
    if spec.role == "warm":  # one message that tells when the worker is up
        system.send_each(spec.kind, [None])
        return {"seconds": 0.0, "cpu": 0.0}
    if spec.warm:
        if spec.role == "each":
            system.send_each(spec.kind, [PAYLOAD])
        elif spec.role == "unique":
            system.send_unique(spec.kind, ["warm"])
        else:
            send_bulk(spec.kind, [PAYLOAD])
    cpu, start = cpu_seconds(), time.monotonic()
    if spec.role == "each":
        system.send_each(spec.kind, _paced(spec) if spec.interval else [PAYLOAD] * spec.count)
    elif spec.role == "numbered":
        system.send_each(spec.kind, range(1, spec.count + 1))
    elif spec.role == "bulk":
        send_bulk(spec.kind, [PAYLOAD] * spec.count)
    elif spec.role == "unique":
        system.send_unique(spec.kind, [f"key-{number}" for number in range(spec.count)])
    else:
        system.send_later(spec.kind, _dues(spec))
    return {"seconds": time.monotonic() - start, "cpu": cpu_seconds() - cpu}


def _paced(spec: Spec) -> Iterator[float]:
    """Instants `interval` apart, each given out when it comes."""
    start = time.monotonic()
    for number in range(spec.count):
        wait = start + number * spec.interval - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        yield time.monotonic()


def _dues(spec: Spec) -> Iterator[tuple[float, float]]:
    for number in range(spec.count):
        delay = spec.delay + spec.spread * number / spec.count
        yield delay, time.time() + delay


if __name__ == "__main__":
    main()
