"""The program of a worker process: `python -m tests.support.worker_main SPEC.json`.

Loads the tasks module, makes a runner from the settings and runs it for ever. The module may hold
`SETTINGS` (a dict of TaskRunnerConfig fields that JSON can't carry, such as hooks) and
`on_runner(runner)`, called before the start.

Standard input and output are the test's control channel: a line in is a question, a line out its
answer; end-of-file means that the test is gone, and so is this process then.
"""

import importlib.util
import json
import logging
import os
import resource
import sys
import threading
import time
from typing import Any, TextIO

from taskrunner import RedisStreamQueue, TaskRunner, TaskRunnerConfig, Timings
from tests.support.connect import connect

ORPHANED = 70  # exit code


def main() -> None:
    with open(sys.argv[1]) as file:
        spec: dict[str, Any] = json.load(file)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tasks print belongs in the log
    logging.basicConfig(
        level=spec["log_level"],
        format="%(asctime)s.%(msecs)03d %(levelname)s %(threadName)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    module = _load(spec["module"])
    client = connect(spec["url"], **spec["client"])
    runner = TaskRunner(
        TaskRunnerConfig(
            consumer_group=spec["group"],
            timings=Timings(**spec["timings"]),
            **{**spec["config"], **getattr(module, "SETTINGS", {})},
        ),
        queue=RedisStreamQueue(client, prefix=spec["prefix"], **spec["queue"]),
    )
    if hasattr(module, "on_runner"):
        module.on_runner(runner)
    threading.Thread(
        target=_answer, args=(runner, answers), name="test-control", daemon=True
    ).start()
    runner.run_forever()


def _load(path: str) -> Any:
    found = importlib.util.spec_from_file_location("worker_tasks", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["worker_tasks"] = module
    found.loader.exec_module(module)
    return module


def _answer(runner: TaskRunner, answers: TextIO) -> None:
    while question := os.read(0, 4096):
        for _ in question.splitlines():
            print(json.dumps(_status(runner)), file=answers, flush=True)
    os._exit(ORPHANED)


def _status(runner: TaskRunner) -> dict[str, Any]:
    return {
        "state": str(runner.state),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "workers": runner.workers,
        "is_leader": runner.is_leader,
        "host": runner.host,
        "instance_id": runner.instance_id,
        "errors": [
            {
                "action": report.action,
                "error": repr(report.error),
                "task_name": report.task_name,
                "message_id": report.message_id,
            }
            for report in list(runner.errors)
        ],
        "max_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "cpu_seconds": time.process_time(),
        "monotonic": time.monotonic(),
    }


if __name__ == "__main__":
    main()
