"""Floor 5. `taskrunner doctor`: audit a live Redis, and say what mends what is wrong.

Reads only. With MODULE:RUNNER it also knows the application's tasks: messages beyond their
attempts, tasks that nobody registers, a reclaim_delay that is too short. Commands for redis-cli
leave out the password: set REDISCLI_AUTH.

exit codes: 0 nothing found, or notes only; 1 Redis could not be asked; 2 wrong arguments;
3 warnings or errors
"""

import argparse
from typing import Final

import attrs

from taskrunner.cli.findings import CHECKS, Facts, Finding
from taskrunner.cli.locate import WrongArgument, add_target, locate
from taskrunner.cli.lock_audit import locks_without_task
from taskrunner.cli.table import COLOURS, emphasis, printable, show_json, wrapped

HELP: Final = "find what is wrong with a live system"

FOUND: Final = 3
_ORDER: Final = ("error", "warning", "note")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner doctor`."""
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--locks",
        action="store_true",
        help="also look for unique locks without a task: walks all keys (SCAN); needs MODULE:RUNNER",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, and print the findings, the worst first."""
    target = locate(arguments)
    if arguments.locks and target.application is None:
        raise WrongArgument("--locks needs MODULE:RUNNER: only it knows which locks are its own")
    facts = Facts(target)
    checks = (*CHECKS, locks_without_task) if arguments.locks else CHECKS
    found = [finding for check in checks for finding in check(facts)]
    found.sort(key=lambda finding: _ORDER.index(finding.severity))
    if arguments.json:
        show_json(
            {"findings": [attrs.asdict(finding) for finding in found], "skipped": facts.skipped}
        )
    else:
        for finding in found:
            _show(finding)
        for skipped in facts.skipped:
            print(f"not looked at: {printable(skipped)}")
        group = facts.group
        place = f"group {group.group} on {group.stream} at {group.address}"
        print(f"{len(found) or 'nothing'} found: {place}")
    return FOUND if any(finding.severity != "note" for finding in found) else 0


def _show(finding: Finding) -> None:
    print(f"{emphasis(finding.severity.upper(), COLOURS[finding.severity])} {finding.check}")
    print(wrapped(finding.text, "  "))
    print(wrapped(finding.evidence, "  seen: "))
    print(wrapped(finding.cure, "  cure: "))
    if finding.command is not None:
        print(f"    {printable(finding.command)}")
    print()
