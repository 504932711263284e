"""A copy of one of `examples/`, its processes started as its README says, and called over HTTP."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from taskrunner.cli.embedded import free_port
from tests.support.waiting import eventually
from tests.support.worker import ROOT

_BIN = Path(sys.executable).parent
_PORT = "8000"  # in the READMEs


class Site:
    """The example `name`, in a directory of the test's own, with a Redis of the test's own."""

    def __init__(self, name: str, directory: Path, url: str) -> None:
        self.directory = directory / name
        shutil.copytree(
            ROOT / "examples" / name,
            self.directory,
            ignore=shutil.ignore_patterns("__pycache__", "*.sqlite3"),
        )
        self._readme = (self.directory / "README.md").read_text()
        self._env = {
            **os.environ,
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TASKRUNNER_REDIS_URL": url,
        }
        self._port = free_port()
        self._made: list[subprocess.Popen[bytes]] = []
        self._log_file = directory / "log"

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    def run(self, command: str) -> None:
        """Run a command of the README to its end."""
        assert self.start(command).wait(60) == 0, self.log

    def start(self, command: str) -> "subprocess.Popen[bytes]":
        """Start a command of the README in a process group of its own, on a free port."""
        assert command in self._readme, f"{command!r} is not in the README"
        words = [
            str(self._port) if word == _PORT else word.replace(f":{_PORT}", f":{self._port}")
            for word in shlex.split(command)
        ]
        if words[0] == "taskrunner":
            words[:1] = [sys.executable, "-m", "taskrunner"]
        elif (_BIN / words[0]).exists():
            words[:1] = [str(_BIN / words[0])]
        with self._log_file.open("ab") as log:
            process = subprocess.Popen(
                words,
                cwd=self.directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._made.append(process)
        return process

    def serve(self, command: str) -> None:
        """Start a web server, and wait until it answers."""
        process = self.start(command)

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{command!r} ended\n{self.log}")
            return self.call("GET", "/")[0] != 0

        eventually(answers, 30, message=lambda: self.log)

    def work(self, command: str) -> "subprocess.Popen[bytes]":
        """Start a worker, and wait until it has started."""
        before = self.log.count(" started: ")
        process = self.start(command)
        eventually(lambda: self.log.count(" started: ") > before, 30, message=lambda: self.log)
        return process

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, what the JSON of the answer says)."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read()
            is_json = re.match("application/json", error.headers.get("Content-Type", ""))
            return error.code, json.loads(text) if is_json else text.decode()

    def close(self) -> None:
        """End every process, and what it has started."""
        for process in self._made:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, signum)
                except ProcessLookupError:
                    break
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    continue
            process.wait()
