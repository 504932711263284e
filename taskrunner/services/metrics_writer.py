"""Floor 4: writes this process's figures: timings once a second, claim delays four times a
second."""

from contextlib import suppress
from typing import Final

from taskrunner.clock import monotonic
from taskrunner.reports import Health
from taskrunner.service import Service
from taskrunner.store.metrics import Metrics
from taskrunner.timings import MOST_SAMPLES, ClaimDelays, Timings

_CLAIM_DELAYS: Final = 0.25
_TIMINGS: Final = 1.0


class MetricsWriter(Service):
    """Sums go to Redis here, and nowhere else."""

    def __init__(
        self, health: Health, *, metrics: Metrics, timings: Timings, claim_delays: ClaimDelays
    ) -> None:
        super().__init__("metrics-writer", health)
        self._metrics = metrics
        self._timings = timings
        self._claim_delays = claim_delays
        self._next_timings = 0.0
        self._delays: list[int] = []  # kept while Redis does not take them

    def tick(self) -> float:
        try:
            self._write_claim_delays()
        finally:
            if monotonic() >= self._next_timings:
                self._write_timings()
                self._next_timings = monotonic() + _TIMINGS
        return _CLAIM_DELAYS

    def close(self) -> None:
        with suppress(Exception):  # Redis is away: figures may be lost, work is not
            self._write_timings()
            self._write_claim_delays()

    def _write_claim_delays(self) -> None:
        self._delays = (self._delays + self._claim_delays.take())[-MOST_SAMPLES:]
        if self._delays:
            self._metrics.add_claim_delays(self._delays)
            self._delays = []

    def _write_timings(self) -> None:
        taken = self._timings.take()
        if not taken:
            return
        try:
            left, error = self._metrics.add(taken)
        except Exception:
            self._timings.give_back(taken)
            raise
        if error is not None:
            self._timings.give_back(left)
            raise error
