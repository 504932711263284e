"""The program of a producer under load: `python -m tests.support.load_main URL GROUP PREFIX OUT`.

Dispatches `note` with 0, 1, 2 … without a break until its standard input ends, and writes a line for
each to OUT: `sent` with the instant the call began, `replicated` where both replicas then had it,
`refused` with the error. Every tenth is a delayed one.
"""

import itertools
import json
import os
import sys
import threading
import time
from typing import Any

import redis

from taskrunner import RedisStreamQueue, Registry, TaskRunner, task
from tests.support.connect import connect


def main() -> None:
    url, group, prefix, path = sys.argv[1:]
    stop = threading.Event()
    threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(*words: Any) -> None:
        os.write(out, json.dumps(words).encode() + b"\n")

    client, registry = connect(url), Registry()
    task(name="note", registry=registry)(print)
    runner = TaskRunner(
        consumer_group=group, queue=RedisStreamQueue(connect(url), prefix=prefix), registry=registry
    )
    for number in itertools.count():
        if stop.wait(0.003):
            return
        began = time.monotonic()
        try:
            runner.dispatch("note", number, **({} if number % 10 else {"run_in": 0.5}))
        except (redis.RedisError, OSError) as error:
            say("refused", number, began, f"{type(error).__name__}: {error}")
            stop.wait(0.05)
            continue
        say("sent", number, began)
        try:
            # What a later write of another client waits for has the message before it.
            with client.pipeline(transaction=False) as pipe:
                pipe.set(f"taskrunner:test:{group}", number)
                pipe.execute_command("WAIT", 2, 20)
                if pipe.execute()[1] >= 2:
                    say("replicated", number)
        except (redis.RedisError, OSError):
            pass


def _wait_for_end(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
