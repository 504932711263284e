"""What a supervisor does when the machine can't give it processes. No Redis."""

import sys
from collections.abc import Sequence

import pytest

from taskrunner.cli.supervisor import Supervisor


def supervise(*commands: Sequence[str]) -> int:
    """Run one child, whose command lines are these in turn, the last for good; the exit code."""
    lines = iter(commands)

    def command(number: int, lifeline: int, status: int | None) -> Sequence[str]:
        return next(lines, commands[-1])

    return Supervisor(
        command, processes=1, burst=True, reports=True, shutdown_timeout=1, block=1
    ).run()


NOT_THERE = ["/nowhere/python"]


def test_a_process_that_can_not_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """As one that died at once: no memory, or too many processes, pass."""
    assert supervise(NOT_THERE, NOT_THERE, [sys.executable, "-c", ""]) == 0
    assert caplog.text.count("process p1 could not be started: FileNotFoundError") == 2


def test_a_process_that_can_never_be_started_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """With the exit code that tells whoever watches the supervisor."""
    assert supervise(NOT_THERE) == 1
    assert "no process can live: giving up" in caplog.text
