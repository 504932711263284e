"""Parent side: the libraries that TaskRunner is compared with, each in an environment of its own.

`pip` installs them into `.venv-bench/` of the checkout; remove that directory for newer versions.
"""

import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ENVIRONMENTS: Final = Path(__file__).resolve().parents[1] / ".venv-bench"

PACKAGES: Final = {
    "dramatiq": ("dramatiq[redis]",),
    "taskiq": ("taskiq", "taskiq-redis"),
    "saq": ("saq[redis]", "typing_extensions"),  # it needs that without saying so
    "streaq": ("streaq",),
    "celery": ("celery[redis]",),
    "huey": ("huey", "redis"),
    "rq": ("rq",),
}

SHARES: Final = {
    "dramatiq": 0.1,
    "taskiq": 0.1,
    "saq": 0.05,
    "streaq": 0.05,
    "celery": 0.03,
    "huey": 0.1,
    "rq": 0.005,
}
"""How much of TaskRunner's number of tasks takes about as long."""

_LIBRARIES: Final = (*PACKAGES, "taskiq-redis", "redis", "hiredis", "coredis")
_VERSIONS: Final = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(", ".join(f"{name} {found[name]}" for name in found))
"""


def prepare(systems: Iterable[str]) -> dict[str, Path]:
    """Make the environments that are missing; returns the interpreter of each system."""
    pythons = {}
    for system in systems:
        if system not in PACKAGES:
            pythons[system] = Path(sys.executable)
            continue
        home = ENVIRONMENTS / system
        python = home / "bin" / "python"
        complete = home / "complete"
        if not complete.exists():
            print(f"installing {system} ...", file=sys.stderr)
            venv.create(home, with_pip=True, clear=True)
            subprocess.run(
                [str(python), "-m", "pip", "install", "--quiet", "hiredis", *PACKAGES[system]],
                check=True,
            )
            complete.touch()
        pythons[system] = python
    return pythons


def versions(system: str, python: Path) -> str:
    """The libraries that a peer runs with."""
    output = subprocess.run(
        [str(python), "-c", _VERSIONS, *_LIBRARIES], check=True, capture_output=True, text=True
    )
    return output.stdout.strip()
