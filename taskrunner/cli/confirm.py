"""Floor 5. The question before something is destroyed."""

import argparse
import sys

from taskrunner.cli.locate import WrongArgument


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Declare `--yes`."""
    parser.add_argument("--yes", action="store_true", help="don't ask")


def confirmed(arguments: argparse.Namespace, question: str) -> bool:
    """Whether the user wants it. Raises WrongArgument where nobody can be asked."""
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise WrongArgument(f"{question} Nobody can be asked here: add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was changed", file=sys.stderr)
    return False
