"""Floor 5. `taskrunner dead`: look at what failed for good, and decide what becomes of it.

A task that fails on its last attempt, and has no failed-task handler, is kept as a dead letter with
its payload, its error and its traceback. `requeue` gives it fresh attempts.
"""

import argparse
import json
from typing import Any, Final

import attrs

from taskrunner.cli.arguments import positive
from taskrunner.cli.confirm import add_yes, confirmed
from taskrunner.cli.locate import Target, WrongArgument, add_target, locate
from taskrunner.cli.table import instant, pairs, printable, shortened, show_json, table
from taskrunner.errors import TaskRunnerError
from taskrunner.store.dead_letters import DeadLetter
from taskrunner.store.group import is_entry_id

HELP: Final = "list, show, requeue, delete or purge dead letters"

_LONGEST_ERROR: Final = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner dead`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    one = actions.add_parser("list", help="the oldest dead letters")
    add_target(one)
    one.add_argument(
        "--limit", type=positive, default=100, metavar="N", help="at most so many (default: 100)"
    )
    one.add_argument("--after", metavar="ID", help="only those behind this one")
    one.add_argument("--json", action="store_true", help="as JSON")
    one.set_defaults(action=_list)

    one = actions.add_parser("show", help="all about one dead letter")
    add_target(one)
    one.add_argument("id", metavar="ID", help="as `dead list` shows it")
    one.add_argument("--json", action="store_true", help="as JSON")
    one.set_defaults(action=_show)

    one = actions.add_parser("requeue", help="back on the queue, with fresh attempts")
    add_target(one)
    one.add_argument("id", metavar="ID|all", help="a dead letter, or all of them")
    one.set_defaults(action=_requeue)

    one = actions.add_parser("delete", help="delete one dead letter")
    add_target(one)
    one.add_argument("id", metavar="ID", help="as `dead list` shows it")
    add_yes(one)
    one.set_defaults(action=_delete)

    one = actions.add_parser("purge", help="delete all dead letters")
    add_target(one)
    add_yes(one)
    one.set_defaults(action=_purge)


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for; 1 where the letter is not there or can't be requeued."""
    code: int = arguments.action(locate(arguments), arguments)
    return code


def _list(target: Target, arguments: argparse.Namespace) -> int:
    if arguments.after is not None and not is_entry_id(arguments.after):
        raise WrongArgument(f"--after {arguments.after} is not the id of a dead letter")
    letters = target.runner.dead_letters.list(arguments.limit, arguments.after)
    if arguments.json:
        show_json([_as_dict(letter) for letter in letters])
    elif letters:
        rows = [
            (
                letter.id,
                letter.task_name or "-",
                instant(letter.failed_at),
                str(letter.attempts),
                shortened(_error(letter), _LONGEST_ERROR),
            )
            for letter in letters
        ]
        headings = ("ID", "TASK", "FAILED AT", "ATTEMPTS", "ERROR")
        print(table(headings, rows, cut=("TASK", "ERROR"), spare=("ATTEMPTS",)))
    else:
        print("no dead letters")
    return 0


def _show(target: Target, arguments: argparse.Namespace) -> int:
    letter = target.runner.dead_letters.get(arguments.id)
    if letter is None:
        raise _missing(arguments.id)
    if arguments.json:
        show_json({**_as_dict(letter), "message": letter.message})
        return 0
    rows = [
        ("id", letter.id),
        ("task", letter.task_name or "-"),
        ("message", letter.message_id or "-"),
        ("attempts", str(letter.attempts)),
        ("failed at", instant(letter.failed_at)),
        ("error", _error(letter)),
        ("payload", json.dumps(letter.payload, ensure_ascii=False)),
    ]
    print(pairs(rows))
    if letter.traceback:
        print()
        print("\n".join(printable(line) for line in letter.traceback.rstrip().splitlines()))
    return 0


def _requeue(target: Target, arguments: argparse.Namespace) -> int:
    letters = target.runner.dead_letters
    if arguments.id == "all":
        requeued, skipped = letters.requeue_all()
        print(f"requeued {requeued}" + (f", {skipped} stayed" if skipped else ""))
        return 1 if skipped else 0
    try:
        entry_id = letters.requeue(arguments.id)
    except KeyError:
        raise _missing(arguments.id) from None
    print(f"requeued {arguments.id} as entry {entry_id}")
    return 0


def _delete(target: Target, arguments: argparse.Namespace) -> int:
    letter = target.runner.dead_letters.get(arguments.id)
    if letter is None:
        raise _missing(arguments.id)
    name = printable(letter.task_name)
    if not confirmed(arguments, f"Delete dead letter {letter.id} (task {name!r}) for good?"):
        return 1
    if not target.runner.dead_letters.delete(letter.id):
        raise _missing(arguments.id)
    print(f"deleted {letter.id}")
    return 0


def _purge(target: Target, arguments: argparse.Namespace) -> int:
    letters = target.runner.dead_letters
    group = target.runner.config.consumer_group
    if not confirmed(
        arguments, f"Delete all {len(letters)} dead letters of group {group!r} for good?"
    ):
        return 1
    print(f"deleted {letters.purge()}")
    return 0


def _missing(id: str) -> TaskRunnerError:
    return TaskRunnerError(f"there is no dead letter {printable(id)}")


def _error(letter: DeadLetter) -> str:
    """What the task raised, where it was the task."""
    return letter.error.removeprefix(f"TaskExecutionError: task {letter.task_name!r} failed: ")


def _as_dict(letter: DeadLetter) -> dict[str, Any]:
    values = attrs.asdict(letter)
    del values["message"]
    return values
