"""Floor 5. `taskrunner purge`: delete every entry of the queue, and release unique locks.

What is being run goes on to its end, but would not come back after a crash. Delayed tasks and dead
letters stay: see `delayed` and `dead`.
"""

import argparse
from typing import Final

from taskrunner.cli.confirm import add_yes, confirmed
from taskrunner.cli.locate import add_target, locate

HELP: Final = "delete every entry of the queue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner purge`."""
    add_target(parser)
    add_yes(parser)


def run(arguments: argparse.Namespace) -> int:
    """Delete what is in the queue now."""
    queue = locate(arguments).runner.queue
    if not confirmed(
        arguments,
        f"Delete all {len(queue)} entries of {queue.stream} at {queue.connections.address}, "
        "those being run too?",
    ):
        return 1
    print(f"deleted {queue.purge()}")
    return 0
