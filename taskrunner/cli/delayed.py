"""Floor 5. `taskrunner delayed`: what waits for its due time, and taking it out.

Tasks dispatched for later, and retries that wait longer than reclaim_delay. A worker that leads
its group moves each to the queue when it is due.
"""

import argparse
import json
import time
from typing import Final

import attrs

from taskrunner.cli.arguments import positive
from taskrunner.cli.confirm import add_yes, confirmed
from taskrunner.cli.locate import Target, add_target, locate
from taskrunner.cli.table import duration, instant, printable, shortened, show_json, table
from taskrunner.errors import TaskRunnerError

HELP: Final = "list or cancel tasks that wait for their time"

_LONGEST_PAYLOAD: Final = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner delayed`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    one = actions.add_parser("list", help="the next due first")
    add_target(one)
    one.add_argument(
        "--limit", type=positive, default=100, metavar="N", help="at most so many (default: 100)"
    )
    one.add_argument("--json", action="store_true", help="as JSON")
    one.set_defaults(action=_list)

    one = actions.add_parser("cancel", help="take one out; its unique lock is released")
    add_target(one)
    one.add_argument("id", metavar="ID", help="as `delayed list` shows it")
    add_yes(one)
    one.set_defaults(action=_cancel)


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for; 1 where the task is not there."""
    code: int = arguments.action(locate(arguments), arguments)
    return code


def _list(target: Target, arguments: argparse.Namespace) -> int:
    tasks = target.runner.delayed.list(arguments.limit)
    if arguments.json:
        show_json([attrs.asdict(task) for task in tasks])
    elif tasks:
        now = time.time()
        rows = [
            (
                task.id or "(unreadable)",
                task.task_name or "-",
                instant(task.run_at),
                duration(task.run_at - now),
                str(task.attempt),
                shortened(json.dumps(task.payload, ensure_ascii=False), _LONGEST_PAYLOAD),
            )
            for task in tasks
        ]
        headings = ("ID", "TASK", "DUE AT", "DUE IN", "ATTEMPTS", "PAYLOAD")
        print(table(headings, rows, cut=("TASK", "PAYLOAD"), spare=("DUE AT", "ATTEMPTS")))
    else:
        print("nothing is delayed")
    return 0


def _cancel(target: Target, arguments: argparse.Namespace) -> int:
    task = target.runner.delayed.get(arguments.id)
    if task is None:
        raise _missing(arguments.id)
    name, due = printable(task.task_name), instant(task.run_at)
    if not confirmed(arguments, f"Cancel {task.id} (task {name!r}, due {due}) for good?"):
        return 1
    if not target.runner.delayed.cancel(task.id):
        raise _missing(arguments.id)
    print(f"cancelled {task.id}")
    return 0


def _missing(id: str) -> TaskRunnerError:
    return TaskRunnerError(f"nothing delayed has the id {printable(id)}")
