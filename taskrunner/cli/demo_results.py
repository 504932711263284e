"""Floor 5. What the demo's workers have written, as the parent reads it."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import attrs


@attrs.define(kw_only=True)
class Worker:
    """A worker process, and how far its results have been read."""

    host: str
    process: subprocess.Popen[bytes]
    log: Path
    results: Path
    read_up_to: int = 0

    def new_results(self) -> list[dict[str, Any]]:
        """Return what was written since the last call; a line torn by a kill is not a result."""
        if not self.results.exists():
            return []
        with self.results.open("rb") as file:
            file.seek(self.read_up_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.read_up_to += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


@attrs.define
class Results:
    """The results of all workers; of a path that ran twice, the first one counts."""

    by_path: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    runs: Counter[str] = attrs.field(factory=Counter)
    failures: Counter[str] = attrs.field(factory=Counter)
    reclaimed: set[str] = attrs.field(factory=set)
    first_at: float = float("inf")
    last_at: float = 0.0

    def __len__(self) -> int:
        """Return how many paths have a result."""
        return len(self.by_path)

    def add(self, result: dict[str, Any]) -> None:
        """Take in one line of a worker's."""
        path = result["path"]
        if "error" in result:
            self.failures[path] += 1
            return
        self.runs[path] += 1
        # Attempts that no failure explains were lost with their worker.
        if result["attempt"] - 1 > self.failures[path]:
            self.reclaimed.add(path)
        self.by_path.setdefault(path, result)
        self.first_at = min(self.first_at, result["at"])
        self.last_at = max(self.last_at, result["at"])

    def total(self, name: str) -> int:
        """Return the sum of one measurement over all files."""
        return sum(result[name] for result in self.by_path.values())
