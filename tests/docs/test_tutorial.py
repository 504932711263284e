"""`docs/tutorial.md` is done as a reader would do it, and shows what the page shows.

Files are written, commands are typed into a shell, and what they print is compared with the page, line by
line, but for what differs each time: ids, instants, durations, versions, the port, the host's name.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from taskrunner.cli.embedded import free_port
from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
PATIENCE = 60.0  # each command starts an interpreter, on a machine that may be busy

# What a reader does once for all terminals; here the terminals are made with it.
ARRANGED = ("mkdir ", "python3 -m venv ", "pip install ")
# Commands that only look: typed again until what they wait for has happened.
LOOKING = ("taskrunner info", "taskrunner dead list", "taskrunner delayed list")
WORKER = "taskrunner worker tasks:runner"

VARYING = [
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<id>"),
    (r"\b\d{13}-\d+", "<entry>"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(Z|,\d{3})", "<instant>"),
    (r"\b(6 d 23 h|7 d 0 h)", "7 d"),
    (r"<?[\d,.]+ m?s\b", "<duration>"),
    (r"(?m)^tasks a second .*", "tasks a second <rate>"),
    (r"(Redis|Valkey) \d+\.\d+\.\d+", "<server>"),
    (r"taskrunner \d+\.\d+\.\d+\S*", "taskrunner <version>"),
    (r"(?m)[ \t]+$", ""),
    (r"(?<=\S) +", " "),
]


@attrs.frozen
class Block:
    """A fenced block: its language, its text, and the terminal that the comment above it names."""

    language: str
    text: str
    terminal: str


def blocks() -> list[Block]:
    pattern = r"(?ms)(?:^<!-- terminal: ([^>]+) -->\n)?^```(\w+)\n(.*?)^```$"
    return [
        Block(language, text, terminal or "third")
        for terminal, language, text in re.findall(pattern, PAGE.read_text())
    ]


class Terminal:
    """A shell's window: what is typed runs there until it ends or is interrupted."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._read = 0

    def start(self, command: str) -> None:
        """Type a command that stays."""
        self._process = subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=self._directory,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line)

    def expect(self, text: str) -> None:
        """The next lines are these."""
        wanted = text.count("\n")

        def shown() -> bool:
            return len(self._lines) >= self._read + wanted

        try:
            eventually(shown, PATIENCE)
        finally:
            seen = "".join(self._lines[self._read : self._read + wanted])
            assert in_order(plain(seen)) == in_order(plain(text))
        self._read += wanted

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> None:
        """Until the prompt is back."""
        assert self._process is not None
        assert self._process.wait(PATIENCE) == 0

    def close(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def plain(text: str) -> str:
    text = text.replace(socket.gethostname(), "laptop")
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return text


def in_order(text: str) -> list[str]:
    """The lines; what threads log of their state comes in any order."""
    lines = text.splitlines()
    states = [line for line in lines if line.startswith("<instant> INFO")]
    return [line for line in lines if line not in states] + sorted(states)


class Reader:
    """Does what the page says, with a port of its own in place of 6379."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        commands = directory.parent / "bin"
        commands.mkdir()
        for name, words in (("python", ""), ("taskrunner", "-m taskrunner ")):
            script = commands / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
            script.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",  # tasks.py changes within a second
            "TASKRUNNER_REDIS_URL": f"redis://localhost:{self.port}/0",
        }
        self.terminals = {
            name: Terminal(directory, self.environment) for name in ("redis", "worker")
        }

    def follow(self, block: Block) -> None:
        if block.language == "python":
            self.write(block.text)
        elif block.language == "text":
            self.terminals[block.terminal].expect(self.ours(block.text))
        elif block.terminal in self.terminals:
            self.sit_at(self.terminals[block.terminal], block.text)
        else:
            if block.terminal == "worker, restarted":
                self.restart_worker()
            for command, output in commands_of(block.text):
                self.type(command, self.ours(output))

    def write(self, text: str) -> None:
        head, _, rest = text.partition("\n")
        found = re.fullmatch(r"# (\w+\.py)(, added|, changed)?", head)
        if found is None:
            return  # an illustration
        path = self.directory / found[1]
        if found[2] == ", added":
            text = path.read_text() + "\n\n" + rest
        elif found[2] == ", changed":
            function = rest.partition("\n")[0]
            text = path.read_text().partition(function)[0] + rest
        path.write_text(text)

    def sit_at(self, terminal: Terminal, text: str) -> None:
        if text.startswith("^C\n"):
            said, _, text = text.removeprefix("^C\n").partition("$ ")
            terminal.interrupt()
            terminal.expect(self.ours(said))
            terminal.wait()
            text = f"$ {text}"
        ((command, output),) = commands_of(text)
        if command == "taskrunner redis":
            command += f" --port {self.port}"
        terminal.start(command)
        terminal.expect(self.ours(output))

    def restart_worker(self) -> None:
        """What the page shows before in full."""
        shown = [block.text for block in blocks() if block.text.startswith("^C\n")][-1]
        self.sit_at(self.terminals["worker"], shown)

    def type(self, command: str, output: str) -> None:
        if command.startswith(ARRANGED):
            return

        def typed() -> str:
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=self.directory,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            return plain(done.stdout)

        if command.startswith(LOOKING):
            seen: list[str] = []

            def as_shown() -> bool:
                seen.append(typed())
                return seen[-1] == plain(output)

            try:
                eventually(as_shown, PATIENCE)
            finally:
                assert seen[-1] == plain(output)
        else:
            assert typed() == plain(output)

    def ours(self, text: str) -> str:
        return text.replace("6379", str(self.port))


def commands_of(text: str) -> list[tuple[str, str]]:
    """(command, output) for each line that begins with a prompt."""
    parts = re.split(r"(?m)^\$ ", text)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    directory = tmp_path / "shop"
    directory.mkdir()
    made = Reader(directory)
    yield made
    for terminal in made.terminals.values():
        terminal.close()
    shutil.rmtree(directory)


@pytest.mark.timeout(400)
def test_the_tutorial_shows_what_happens(reader: Reader) -> None:
    """From the empty directory to the last command."""
    for block in blocks():
        reader.follow(block)
