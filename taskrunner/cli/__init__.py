"""Floor 5. The `taskrunner` command: what its subcommands are, and what their errors look like.

One file per subcommand. Its module has `HELP` (a line for the list), `add_arguments(parser)` and
`run(arguments) -> exit code`; its docstring is the long help. To add one, add it to `COMMANDS`.
"""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from taskrunner.cli import (
    dead,
    delayed,
    demo,
    doctor,
    enqueue,
    info,
    purge,
    redis,
    standard,
    worker,
)
from taskrunner.cli.arguments import HelpFormatter, Parser
from taskrunner.errors import ConfigurationError, TaskRunnerError, describe
from taskrunner.store import connection

COMMANDS: Final[dict[str, ModuleType]] = {
    "worker": worker,
    "demo": demo,
    "info": info,
    "doctor": doctor,
    "enqueue": enqueue,
    "dead": dead,
    "delayed": delayed,
    "purge": purge,
    "redis": redis,
}

WRONG_ARGUMENTS: Final = 2
INTERRUPTED: Final = 130  # as a shell counts an end by SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done; 1: it failed, and said why; 2: the arguments are wrong; 130: interrupted.
    """
    standard.open_missing()
    parser = _parser()
    arguments = parser.parse_args(argv)
    command: ModuleType = arguments.command
    try:
        code: int = command.run(arguments)
        sys.stdout.flush()
    except (
        ConfigurationError
    ) as error:  # what the arguments name is not there, or not as it must be
        print(f"taskrunner: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS
    except TaskRunnerError as error:
        print(f"taskrunner: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left, as `| head` does
        standard.drop_output()
        return 1
    except Exception as error:  # Redis's own errors pass as they are: here they end
        if (reason := standard.unwritable(error)) is not None:
            standard.drop_output()
            print(f"taskrunner: the output can't be written: {reason}", file=sys.stderr)
            return 1
        if not (connection.lost(error) or connection.answered(error)):
            raise
        print(f"taskrunner: Redis: {describe(error).rstrip('.')}{_advice(error)}", file=sys.stderr)
        return 1
    return code


def _advice(error: Exception) -> str:
    """What to do about it, where that is always the same."""
    if connection.refused_login(error):
        return ". User and password stand in the URL: redis://user:password@host:port/db"
    if connection.lost(error):
        return (
            ". See that it runs there: the address is the application's, or that of --url, or of "
            "TASKRUNNER_REDIS_URL"
        )
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="taskrunner", description="Distributed background jobs on Redis Streams.")
    parser.add_argument("--version", action="version", version=f"taskrunner {worker.version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        _, _, details = (module.__doc__ or "").partition("\n\n")
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=details,
            formatter_class=HelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(command=module)
    return parser
