"""Floor 4: calls the application's on_error hook, in a thread of its own: a hook that hangs holds
up nobody."""

from collections.abc import Callable
from queue import Empty
from typing import Any

from taskrunner.errors import describe
from taskrunner.reports import Health, Reports, log
from taskrunner.service import Service


class Reporter(Service):
    """Hands reports to the hook, in order."""

    jitter = 0.0

    def __init__(self, health: Health, reports: Reports, hook: Callable[[Any], object]) -> None:
        super().__init__("reporter", health)
        self._reports = reports
        self._hook = hook

    def tick(self) -> float:
        assert self._reports.for_hook is not None
        try:
            report = self._reports.for_hook.get(timeout=1.0)
        except Empty:
            return 0.0
        if report is not None:
            self._call(report)
        return 0.0

    def wake(self) -> None:
        super().wake()
        if self._reports.for_hook is not None:
            self._reports.for_hook.put(None)

    def close(self) -> None:
        assert self._reports.for_hook is not None
        while True:
            try:
                report = self._reports.for_hook.get_nowait()
            except Empty:
                return
            if report is not None:
                self._call(report)

    def _call(self, report: Any) -> None:
        try:
            self._hook(report)
        except BaseException as error:  # the hook is the application's
            log.error("on_error raised: %s", describe(error), extra={"action": "service_error"})
