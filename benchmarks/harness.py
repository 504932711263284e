"""Parent side: the private server, the child processes, and what the server counted meanwhile."""

import compileall
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import redis

from benchmarks.bodies import calibrate
from benchmarks.child import PAYLOAD
from benchmarks.systems import Spec
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.message import encode

ROOT: Final = Path(__file__).resolve().parents[1]
SPIN_SECONDS: Final = 50e-6
PATIENCE: Final = 120.0

_OURS: Final = frozenset(("info", "flushall", "config|resetstat", "xlen"))
_MESSAGE: Final = encode(
    "bench.noop",
    json.dumps(PAYLOAD, separators=(",", ":")),
    id="0" * 36,
    enqueued_at=1700000000.123456,
    reservation_timeout_ns=100_000_000_000,
)


class ChildError(Exception):
    """A child process failed or fell silent; the text ends with what it printed."""


class Child:
    """One producer or worker process in a session of its own, that ends with this one."""

    def __init__(self, python: Path, spec: Spec, log: Path, code: Path) -> None:
        self._log = log
        self._spec = spec
        self._buffer = b""
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.child", json.dumps(asdict(spec))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=code,  # the first place where -m looks
                start_new_session=True,
            )

    def event(self, wanted: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait for an event; ChildError when the child ends or says nothing for that long."""
        deadline = time.monotonic() + timeout
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                event: dict[str, Any] = json.loads(line)
                if event["event"] == wanted:
                    return event
                continue
            if not self._read(deadline - time.monotonic()):
                raise ChildError(self._explain(f"did not say {wanted!r}"))

    def end(self, signum: int = signal.SIGKILL) -> None:
        """End it, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _read(self, timeout: float) -> bool:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], max(0.0, timeout))[0]:
            return False
        data = os.read(stdout.fileno(), 1 << 20)
        self._buffer += data
        return data != b""

    def _explain(self, what: str) -> str:
        tail = self._log.read_text(errors="replace")[-3000:]
        return f"{self._spec.system} ({self._spec.role}, {self._spec.kind}) {what}:\n{tail}"


class Bench:
    """The private server of a run, and the pythons of the systems."""

    def __init__(self, pythons: Mapping[str, Path]) -> None:
        self._pythons = pythons
        self._server = EmbeddedServer(tcp=True)
        self._numbers = itertools.count(1)
        self.loops = calibrate(SPIN_SECONDS)

    def __enter__(self) -> Self:
        self._server.start()
        self._copy()
        self.client = redis.Redis.from_url(self._server.url)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self._server.stop()

    @property
    def url(self) -> str:
        """The server's Unix socket."""
        return self._server.url

    @property
    def server_version(self) -> str:
        """Such as "Redis 7.0.15"."""
        info: Any = self.client.info("server")
        name = "Valkey" if "valkey_version" in info else "Redis"
        return f"{name} {info.get('valkey_version', info['redis_version'])}"

    def python(self, system: str) -> str:
        """The interpreter that system is installed for."""
        return str(self._pythons[system])

    @property
    def code(self) -> Path:
        """The directory that children run in: copies of both packages as they were at the start."""
        return self._server.directory / "code"

    def _copy(self) -> None:
        """An edit during a run must not change what is measured."""
        for package in ("benchmarks", "taskrunner"):
            shutil.copytree(
                ROOT / package,
                self.code / package,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
            compileall.compile_dir(self.code / package, quiet=1)

    def new_file(self) -> Path:
        """A path for a file that lives as long as this run."""
        return self._server.directory / f"file-{next(self._numbers)}"

    def clear(self) -> None:
        """An empty server."""
        self.client.flushall()

    def child(self, system: str, role: str, **options: Any) -> Child:
        """Start a producer or worker of that system."""
        spec = Spec(
            system=system,
            role=role,
            url=self._server.url,
            port=self._server.port,
            loops=self.loops,
            body=_MESSAGE,
        )
        spec = replace(spec, spawned_at=time.monotonic(), **options)
        log = self._server.directory / f"child-{next(self._numbers)}.log"
        return Child(self._pythons[system], spec, log, self.code)

    def produce(self, system: str, role: str, **options: Any) -> dict[str, Any]:
        """Run a producer to its end."""
        with self.child(system, role, **options) as child:
            return child.event("done")

    def counters(self) -> "Counters":
        """What the server has counted so far, without our own questions."""
        stats: Any = self.client.info("commandstats")
        whole: Any = self.client.info("stats")
        commands = {
            name.removeprefix("cmdstat_"): int(value["calls"]) for name, value in stats.items()
        }
        return Counters(
            commands={name: calls for name, calls in commands.items() if name not in _OURS},
            traffic=int(whole["total_net_input_bytes"]) + int(whole["total_net_output_bytes"]),
            reads=int(whole.get("total_reads_processed", 0)),
        )


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Commands (those inside scripts too), bytes both ways, and read events of the server."""

    commands: dict[str, int]
    traffic: int
    reads: int

    def since(self, before: "Counters", tasks: int) -> dict[str, float]:
        """Per task, since `before`."""
        calls = sum(self.commands.values()) - sum(before.commands.values())
        return {
            "commands": calls / tasks,
            "bytes": (self.traffic - before.traffic) / tasks,
            "reads": (self.reads - before.reads) / tasks,
        }
