"""Floor 5: a runner's own parts without its threads: what waits is run in the thread that calls.

Decoding, executing, settling and promoting are the real thing; this only decides what comes next,
and by which clock. Which store lies below, a server or memory, makes no difference here.
"""

import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import attrs

from taskrunner import clock, keys
from taskrunner.clock import Duration, monotonic
from taskrunner.context import TaskContext, TaskMessage
from taskrunner.delivery import Delivery
from taskrunner.errors import TaskRunnerError
from taskrunner.executor import Executor
from taskrunner.in_flight import InFlight
from taskrunner.reports import Health, Reports
from taskrunner.runner import TaskRunner
from taskrunner.services.delayed_poller import DelayedPoller
from taskrunner.services.elector import Elector
from taskrunner.services.reporter import Reporter
from taskrunner.services.time_limits import TimeLimits
from taskrunner.settler import Settler
from taskrunner.store import connection
from taskrunner.store.connection import Connections
from taskrunner.store.delayed_set import DelayedSet
from taskrunner.store.group import ConsumerGroup, Lock, Pending
from taskrunner.store.instances import Instances, OwnedKey, new_instance_id
from taskrunner.timings import Timings

_MOST: Final = 10_000
_BATCH: Final = 100
_wall = clock.now  # the real one: eager mode replaces the module's


class TasksFailedError(TaskRunnerError):
    """Tasks failed for good; `failures` says which, and the first one's error is the cause."""

    def __init__(self, failures: "list[Failure]") -> None:
        super().__init__(failures)
        self.failures = failures
        error = failures[0].error
        self.__cause__ = error.__cause__ or error

    def __str__(self) -> str:
        rest = len(self.failures) - 1
        more = f" (and {rest} more failures)" if rest else ""
        return f"{self.failures[0].error}{more}"


class DrainTimeoutError(TaskRunnerError, TimeoutError):
    """A drain did not come to its end in time."""


@attrs.frozen
class Run:
    """One attempt that was run, and what it raised."""

    message: TaskMessage
    error: BaseException | None = None

    @property
    def task_name(self) -> str:
        """The task's name."""
        return self.message.task_name

    @property
    def payload(self) -> Any:
        """The payload, as the task got it."""
        return self.message.payload

    @property
    def attempt(self) -> int:
        """Which attempt it was, 1 first."""
        return self.message.attempt


@attrs.frozen
class Failure:
    """One message that failed for good; `error` is what a failed-task handler gets.

    What the task raised is the error's `__cause__`. The names are None where nothing could be
    decoded.
    """

    error: BaseException
    task_name: str | None = attrs.field(default=None, kw_only=True)
    message_id: str | None = attrs.field(default=None, kw_only=True)


@attrs.frozen(kw_only=True)
class Drained:
    """What a drain did: attempts in order, failures for good, and how many messages still wait."""

    runs: list[Run]
    failures: list[Failure]
    waiting: int


class MovableClock:
    """A clock that goes with the real one, and ahead of it by what it was moved.

    Moves our decisions (is it due, is a lock over, when was it dispatched), never a server's own
    TIME nor what other code reads from `time` and `datetime`.
    """

    def __init__(self) -> None:
        self.ahead = 0.0  # seconds
        self._wanted = 0.0
        self._reached = 0.0  # what is due until here was run
        self._listener: Callable[[], object] | None = None
        self.parked: dict[tuple[str, bytes], float] = {}
        """How far ahead it was when a drain parked an entry of a stream for its retry."""

    def __repr__(self) -> str:
        return f"<MovableClock {self.ahead:g} s ahead>"

    def now(self) -> float:
        """The time it shows, in unix seconds."""
        return _wall() + self.ahead

    def move(self, by: Duration) -> None:
        """Move on by a duration. In eager mode all that is due by then is run, in order."""
        seconds = clock.seconds(by, "by")
        if seconds < 0:
            raise ValueError(f"by={by!r} is below 0: time does not run backwards")
        self.ahead += seconds
        self._wanted = max(self._wanted, self.ahead)
        if self._listener is not None:
            self._listener()

    def move_to(self, instant: float) -> None:
        """Move on to an instant in unix seconds (`when.timestamp()`); one that is past: stay."""
        self.move(max(0.0, instant - self.now()))

    # --- for the one who runs what becomes due ---

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Have a function called after each move."""
        self._listener = listener

    def play(self, everything: bool) -> Iterator[Callable[[float], bool]]:
        """Once through the time that was not played yet: gives a function that steps on by so many
        seconds, and says whether that is within it."""
        self.ahead = self._reached

        def step(seconds: float) -> bool:
            if not everything and self.ahead + seconds > self._wanted:
                return False
            self.ahead += max(0.0, seconds)
            return True

        try:
            yield step
        finally:
            self.ahead = self._reached = self._wanted = max(self.ahead, self._wanted)


class Recorder(Reports):
    """Reports as a runner keeps them, in its own list, and the failures for good among them."""

    def __init__(self, runner: TaskRunner) -> None:
        super().__init__(hook=runner.config.on_error is not None)
        self.recent = runner.errors
        self.failures: list[Failure] = []

    def add(
        self,
        action: str,
        error: BaseException,
        *,
        task_name: str | None = None,
        message_id: str | None = None,
    ) -> None:
        super().add(action, error, task_name=task_name, message_id=message_id)
        if action == "task_failed":
            self.failures.append(Failure(error, task_name=task_name, message_id=message_id))


class _Limits(TimeLimits):
    """The thread that watches time limits, once a task has one."""

    def run(self, seconds: float, call: Callable[[], object]) -> None:
        self.start()
        super().run(seconds, call)


class _Group(ConsumerGroup):
    """Long retries count from the moved clock."""

    ahead: Callable[[], float]

    def postpone(
        self, delivery: Delivery, delay: float, member: tuple[str, str], lock: Lock | None
    ) -> int:
        return super().postpone(delivery, delay + self.ahead(), member, lock)


class _Delayed(DelayedSet):
    """What is due by the moved clock."""

    ahead: Callable[[], float]
    server_time: Callable[[], float]

    def due(self, most: int) -> tuple[float, float | None, list[tuple[bytes, float]]]:
        now = self.server_time() + self.ahead()
        rows = self._connections.call(
            "ZRANGEBYSCORE", self.key, "-inf", f"{now + 1e-6:.6f}", "WITHSCORES", "LIMIT", 0, most
        )
        return now, None, [(rows[i], float(rows[i + 1])) for i in range(0, len(rows), 2)]


class Inline:
    """Runs what waits for a runner's group.

    `own_clock`: the store tells the time by `moved` itself (memory); a server has its own, which
    `moved` goes ahead of.
    """

    def __init__(
        self,
        runner: TaskRunner,
        connections: Connections,
        moved: MovableClock,
        *,
        own_clock: bool,
    ) -> None:
        config, queue = runner.config, runner.queue
        name = config.consumer_group
        observers = runner._observers  # pyright: ignore[reportPrivateUsage]
        self._runner = runner
        self._clock = moved
        ahead: Callable[[], float] = (lambda: 0.0) if own_clock else (lambda: moved.ahead)
        self._ahead = ahead
        self.reports = Recorder(runner)
        if observers:
            self.reports.listener = observers.reported
        self.runs: list[Run] = []
        self._mine = threading.local()
        self._settling = threading.Lock()
        self._playing = threading.Lock()
        self._host = f"inline-{new_instance_id()}"
        self._consumer = keys.consumer(name, self._host, 1)
        self._link = connections.open()
        health = Health(self.reports, connection.lost)
        self._group = _Group(
            connections,
            queue.stream,
            name,
            reclaim_ms=math.ceil(queue.reclaim_delay * 1000),
            delete_on_ack=queue.delete_on_ack,
        )
        self._group.ahead = ahead
        self._any_age = ConsumerGroup(
            connections, queue.stream, name, reclaim_ms=0, delete_on_ack=queue.delete_on_ack
        )
        self._instances = Instances(connections, self._group)
        self._delayed = delayed = _Delayed(connections, queue.stream, name)
        delayed.ahead, delayed.server_time = ahead, self._instances.server_time
        self._in_flight = InFlight()
        self._settler = Settler(
            health,
            in_flight=self._in_flight,
            deliveries=self._group,
            reports=self.reports,
            busy=lambda: False,
            host=lambda: self._host,
            parked=lambda entry_id, due: moved.parked.update({(queue.stream, entry_id): ahead()}),
            settled_alone=lambda: None,
            most_waiting=_MOST,
            dead_letter_limit=config.dead_letter_limit,
        )
        self._limits = _Limits(health)
        self._execute = Executor(
            registry=runner.registry,
            config=attrs.evolve(config, after_task=self._after),
            group=name,
            reclaim_delay=queue.reclaim_delay,
            in_flight=self._in_flight,
            settler=self._settler,
            deliveries=self._group,
            limits=self._limits,
            timings=Timings(),
            reports=self.reports,
            health=health,
            confirm=lambda: None,
            renew_early=lambda: None,
            stopping=lambda: False,
            observers=observers,
        )
        self._elector = Elector(
            health,
            lease=OwnedKey(connections, keys.leader(name), new_instance_id()),
            ttl=config.timings.lease,
            poll=config.timings.poll,
            channel=keys.channel(name),
            won=lambda: None,
        )
        self._poller = DelayedPoller(
            health,
            delayed=delayed,
            elector=self._elector,
            registry=runner.registry,
            reports=self.reports,
            timings=Timings(),
            observers=observers,
            reclaim_delay=queue.reclaim_delay,
            poll=config.timings.poll,
            dead_letter_limit=config.dead_letter_limit,
        )
        self._reporter = (
            Reporter(health, self.reports, config.on_error) if config.on_error else None
        )

    def close(self) -> None:
        """Leave nothing behind."""
        self._limits.stop()
        self._limits.join(1.0)
        self._elector.close()
        self._group.remove_consumer(self._consumer, self._host, idle_ms=0)
        self._link.close()

    def waiting(self) -> int:
        """How many messages wait: to be read, for a retry, and for their due time."""
        connections = self._group.connections
        return int(connections.call("XLEN", self._group.stream)) + len(self._delayed)

    @property
    def busy(self) -> bool:
        """Whether this thread runs what waits just now: then it comes back to what was added."""
        return getattr(self._mine, "busy", False)

    # --- running ---

    def run_new(self) -> None:
        """Run what this thread may read; nothing that has to wait."""
        self._mine.busy = True
        try:
            left = _Bounds(math.inf)
            while self._run_new(left):
                pass
        finally:
            self._mine.busy = False

    def run_due(self, *, everything: bool, timeout: float, adopt: Callable[[], None]) -> None:
        """Run what waits, and what is due by the moved clock, or by any; each at its time."""
        left = _Bounds(monotonic() + timeout)
        with self._playing:
            self._mine.busy = True
            try:
                for step in self._clock.play(everything):
                    self._play(step, left, adopt)
            finally:
                self._mine.busy = False

    def _play(
        self, step: Callable[[float], bool], left: "_Bounds", adopt: Callable[[], None]
    ) -> None:
        while True:
            left.look()
            adopt()
            if self._run_new(left):
                continue
            due, take = min(self._events(), key=lambda event: event[0], default=(math.inf, None))
            if take is None or not step(due):
                return
            take(left)

    def _run_new(self, left: "_Bounds") -> bool:
        try:
            batch = self._group.read(self._link, self._consumer, 1, None)
        except Exception as error:  # a new queue has no group yet
            if not connection.missing_group(error):
                raise
            self._group.create()
            return True
        for delivery in batch:
            self._run(delivery, left)
        return bool(batch)

    def _run(self, delivery: Delivery, left: "_Bounds") -> None:
        left.count()
        self._mine.interrupt = None
        self._in_flight.add(delivery)
        self._execute(delivery)
        with self._settling:
            while self._settler.unsettled:
                self._settler.tick()
                left.look()
        self._report()
        if self._mine.interrupt is not None:
            raise self._mine.interrupt

    def _after(self, context: TaskContext, error: BaseException | None) -> None:
        self.runs.append(Run(context.message, error))
        if error is not None and not isinstance(error, Exception | SystemExit | GeneratorExit):
            # Ctrl-C, pytest.fail, pytest.skip: meant for the test, and no worker has one around it.
            self._mine.interrupt = error
        if self._runner.config.after_task is not None:
            self._runner.config.after_task(context, error)

    def _report(self) -> None:
        if self._reporter is not None:
            self._reporter.close()

    # --- what becomes due ---

    def _events(self) -> Iterator[tuple[float, Callable[["_Bounds"], None]]]:
        """What waits for a time: (seconds until then, what to do)."""
        for first in self._delayed.list(1):
            yield first.run_at - self._instances.server_time() - self._ahead(), self._promote
        for row in self._waiting_deliveries():
            due = (self._group.reclaim_ms - row.idle_ms) / 1000
            due += self._clock.parked.get((self._group.stream, row.entry_id), 0.0) - self._ahead()
            yield due, partial(self._take_over, row)

    def _promote(self, left: "_Bounds") -> None:
        self._elector.tick()
        if not self._elector.is_leader():
            raise RuntimeError(
                f"a running worker leads group {self._runner.config.consumer_group!r} and moves "
                "its delayed messages by Redis's clock: stop it before a drain"
            )
        self._poller.tick()
        self._report()

    def _waiting_deliveries(self) -> list[Pending]:
        """Retries, what was handed back, and what a dead worker left."""
        rows: list[Pending] = []
        after: bytes | None = b"-"
        while after is not None:
            page, after = self._any_age.overdue(after, _BATCH)
            rows += page
        parsed = [keys.parse_consumer(self._group.name, row.consumer) for row in rows]
        living = self._instances.living(
            found[0] for found in parsed if found is not None and found[1] != keys.PARKING
        )
        return [
            row
            for row, found in zip(rows, parsed, strict=True)
            if row.entry_id not in self._in_flight
            and (found is None or found[1] == keys.PARKING or found[0] not in living)
        ]

    def _take_over(self, row: Pending, left: "_Bounds") -> None:
        for claimed in self._any_age.claim([row.entry_id], self._consumer):
            self._clock.parked.pop((self._group.stream, row.entry_id), None)
            if claimed.delivery is not None:
                self._run(claimed.delivery, left)


class _Bounds:
    """Where a drain has to end, if it does not by itself."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._runs = 0

    def look(self) -> None:
        """Raise when time is up."""
        if monotonic() > self._deadline:
            raise DrainTimeoutError(
                f"not at an end in time, after {self._runs} messages: does a task take long, "
                "or dispatch itself? Give more with timeout="
            )

    def count(self) -> None:
        """Raise when a message is one too many."""
        self._runs += 1
        if self._runs > _MOST:
            raise RuntimeError(
                f"not at an end after {_MOST} messages: does a task dispatch itself?"
            )
