"""Floor 5. `taskrunner enqueue`: dispatch one task by its name.

With MODULE:RUNNER it is the application's task, with its options; a name it does not know is an
error. With --group any name is sent as it is, and never as a unique task.
"""

import argparse
import json
import sys
from typing import Any, Final

import attrs

from taskrunner.cli.arguments import seconds
from taskrunner.cli.locate import WrongArgument, add_target, locate
from taskrunner.cli.table import instant, show_json
from taskrunner.errors import TaskRunnerError
from taskrunner.task import task

HELP: Final = "dispatch one task"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner enqueue`."""
    add_target(parser)
    parser.add_argument("name", metavar="NAME", help="the task's name")
    parser.add_argument("payload", metavar="JSON", help="its payload; - reads standard input")
    parser.add_argument(
        "--in", dest="run_in", type=seconds, metavar="SECONDS", help="not at once, but in so long"
    )
    parser.add_argument("--json", action="store_true", help="say what was sent as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Dispatch the task and say under which id."""
    target = locate(arguments)
    payload = _payload(arguments.payload)
    if target.application is None:
        task(name=arguments.name, registry=target.runner.registry)(_elsewhere)
    try:
        sent = target.runner.dispatch(arguments.name, payload, run_in=arguments.run_in)
    except TaskRunnerError:
        raise
    except ValueError as error:  # a time that names no instant
        raise WrongArgument(str(error)) from None
    if arguments.json:
        show_json(attrs.asdict(sent))
    elif sent.run_at is not None:
        print(f"delayed {sent.task_name} until {instant(sent.run_at)}: id {sent.id}")
    else:
        print(f"sent {sent.task_name}: id {sent.id}, entry {sent.entry_id}")
    return 0


def _payload(text: str) -> Any:
    if text == "-":
        text = sys.stdin.read()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongArgument(
            f"the payload is not JSON ({error}); a text needs its quotes: '\"text\"'"
        ) from None


def _elsewhere(payload: Any) -> None:
    """Stands for a task that only the workers know."""
