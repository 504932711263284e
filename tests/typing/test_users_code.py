"""Types, as a user's checker sees them."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import taskrunner

CODE = Path(__file__).with_name("users_code.py")
ROOT = Path(inspect.getfile(taskrunner)).parents[1]


WORDS = {
    "mypy": ["--strict", "--warn-unused-ignores", "--cache-dir", "cache"],
    "pyright": ["--pythonpath", sys.executable],
}


def lines_with_errors(checker: str, directory: Path) -> tuple[set[int], str]:
    """The lines that the checker complains of, and all that it says."""
    run = subprocess.run(
        [sys.executable, "-m", checker, *WORDS[checker], CODE.name],
        cwd=directory,
        env=os.environ | {"MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,  # finding errors is what it is for
    )
    found = re.findall(rf"{CODE.name}:(\d+)(?::\d+)?(?: -|:) error", run.stdout)
    return {int(number) for number in found}, run.stdout + run.stderr


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_rejects_wrong_uses_and_only_those(checker: str, tmp_path: Path) -> None:
    """A wrong payload, option, time, hook or setting is found in the editor, before anything runs.

    Both checkers are installed by `make lint`, which CI runs before the tests.
    """
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    code = CODE.read_text()
    (tmp_path / CODE.name).write_text(code)

    found, said = lines_with_errors(checker, tmp_path)

    wrong = {n for n, line in enumerate(code.splitlines(), 1) if line.endswith("# wrong")}
    assert len(wrong) > 50
    missed, unexpected = sorted(wrong - found), sorted(found - wrong)
    assert (missed, unexpected) == ([], []), said
