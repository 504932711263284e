"""Floor 4: one piece of work in a thread of its own, once: stopping and leaving, which must not
wait for their caller."""

from collections.abc import Callable

from taskrunner.reports import Health, Reports
from taskrunner.service import Service


class Once(Service):
    """Runs a function and ends."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        super().__init__(name, Health(Reports(), lambda error: False))
        self._work = work

    def tick(self) -> float:
        self._stopping = True  # once, also when it fails
        self._work()
        return 0.0
