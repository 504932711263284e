"""Runs pytest as an application would, in a process of its own, with our plugin."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(directory: Path, *words: str, **env: str) -> str:
    """Run the tests in a directory; returns what pytest prints.

    `-p` for a checkout; where the library is installed, its entry point has loaded the plugin.
    """
    made = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "taskrunner_pytest", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}", **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return made.stdout + made.stderr
