"""A producer as a process: `python -m tests.chaos_run.producer SPEC.json`, until its stdin ends.

Of each message it writes down that it tries, and then what came of it: `accepted`, `duplicate`
(the unique lock is another's), or `unknown` (an error: it may be there or not).
"""

import json
import os
import random
import sys
import threading
import time
from typing import Any

import redis

from taskrunner import RedisStreamQueue, TaskAlreadyDispatchedError, TaskRunner
from tests.chaos_run import tasks


def main() -> None:
    """Dispatch at the given pace."""
    with open(sys.argv[1]) as file:
        spec: dict[str, Any] = json.load(file)
    stop = threading.Event()
    threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
    runner = TaskRunner(
        consumer_group=spec["group"],
        queue=RedisStreamQueue(spec["url"], prefix=spec["prefix"], reclaim_delay=spec["reclaim"]),
    )
    chance = random.Random(f"producer-{spec['seed']}-{spec['number']}")
    out = os.open(spec["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    number = 0
    while not stop.wait(chance.expovariate(spec["rate"])):
        number += 1
        name = chance.choices(list(tasks.WEIGHTS), list(tasks.WEIGHTS.values()))[0]
        id_ = f"{spec['number']}-{number}"
        payload = {"id": id_, "n": number, "key": f"k{chance.randrange(tasks.KEYS)}"}
        options: dict[str, Any] = {}
        if chance.random() < 0.2:
            options["run_in"] = chance.random() * 3
        _say(out, "try", id_, name)
        started = time.monotonic()
        try:
            runner.dispatch(name, payload, **options)
            _say(out, "accepted", id_, time.monotonic() - started)
        except TaskAlreadyDispatchedError:
            _say(out, "duplicate", id_, time.monotonic() - started)
        except (redis.RedisError, OSError) as error:
            _say(out, "unknown", id_, time.monotonic() - started, type(error).__name__)


def _say(out: int, *words: Any) -> None:
    os.write(out, json.dumps(words).encode() + b"\n")


def _wait_for_end(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
