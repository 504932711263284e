"""Floor 5. `/metrics` of a worker, whether it is one process or a supervisor with several.

Each process counts in a memory that the supervisor made and shows (see `tally`): a file without a
name, so that nothing is left behind by anybody's death.
"""

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from taskrunner.cli.web import Answer, Page
from taskrunner.errors import ConfigurationError
from taskrunner.runner import TaskRunner
from taskrunner.tally import PROCESS, SIZE, Cells


class SharedCells:
    """A memory for each child of a supervisor, handed to every process that follows in its
    place."""

    def __init__(self, processes: int) -> None:
        self.files = [_nameless_file() for _ in range(processes)]
        self._cells = [Cells(file) for file in self.files]

    def sources(self, pids: Sequence[int | None]) -> list[tuple[Cells, bool]]:
        """What was counted in each child's place, and whether the one that lives there now has
        begun to."""
        return [
            (cells, pid is not None and cells.read().get((PROCESS,), [0])[0] == pid)
            for cells, pid in zip(self._cells, pids, strict=True)
        ]


def page(
    runner: TaskRunner, sources: Callable[[], Sequence[tuple[Cells, bool]]] | None = None
) -> Page:
    """`/metrics` of a runner that was not started yet, or of the children of a supervisor.

    Raises ConfigurationError where prometheus-client is not installed.
    """
    try:
        prometheus: Any = importlib.import_module("taskrunner.prometheus")
        client: Any = importlib.import_module("prometheus_client")
    except ImportError as error:
        raise ConfigurationError(f"--metrics-port: {error}") from error
    registry = client.CollectorRegistry()
    registry.register(prometheus.RunnerCollector(runner, sources))
    return lambda: Answer(200, client.CONTENT_TYPE_LATEST, client.generate_latest(registry))


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("taskrunner-metrics")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.truncate(file, SIZE)
    return file
