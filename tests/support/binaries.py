"""The server binaries at hand, for tests that must hold on the oldest and the newest.

Those of TASKRUNNER_TEST_SERVERS alone (paths, separated as in PATH) where it is set. Else the one
that `find_server` gives, the ones on PATH, and the one of the embedded extra; one for each version.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from taskrunner.cli.embedded import ServerNotFoundError, find_in_wheel, find_server

ENV_VARIABLE = "TASKRUNNER_TEST_SERVERS"


@cache
def servers_at_hand() -> dict[str, Path]:
    """Binary by version, such as "redis-7.0.15" or "valkey-9.1.0"; at least one."""
    named = os.environ.get(ENV_VARIABLE, "")
    found = by_version(map(Path, named.split(os.pathsep)) if named else _candidates())
    assert found, "no server was found"
    return found


def by_version(binaries: Iterator[Path]) -> dict[str, Path]:
    """These servers by what they say they are, the first of each version, in order."""
    found: dict[str, Path] = {}
    for path in binaries:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"(Redis|Valkey) server v=(\S+)", printed.stdout)
        assert version is not None, f"{path}: {printed.stdout}"
        found.setdefault(f"{version[1].lower()}-{version[2]}", path)
    return dict(sorted(found.items()))


def _candidates() -> Iterator[Path]:
    try:
        yield find_server()
    except ServerNotFoundError:
        pass
    yield from on_path()
    if in_wheel := find_in_wheel():
        yield in_wheel


def on_path() -> Iterator[Path]:
    """The servers on PATH."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            yield Path(found)
