"""Floor 5: TaskRunner, the public face: dispatches, starts, stops, and tells what it knows; no
logic of its own.

The parts of a running instance, and the order of their start and stop, are in `parts.py`.
"""

import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, Unpack

import redis

from taskrunner import clock
from taskrunner.clock import Duration, monotonic
from taskrunner.clock import seconds as to_seconds
from taskrunner.config import Settings, TaskRunnerConfig
from taskrunner.dispatcher import StreamDispatcher
from taskrunner.errors import (
    AlreadyStartedError,
    ConfigurationError,
    TaskNotFoundError,
    describe,
    quoted,
)
from taskrunner.observer import Observer, Observers, Sender
from taskrunner.reports import ErrorReport, Reports
from taskrunner.services.once import Once
from taskrunner.signals import Signals
from taskrunner.stats import Load, Stats, compute
from taskrunner.store.connection import Connections
from taskrunner.store.dead_letters import DeadLetters
from taskrunner.store.delayed_set import DelayedSet
from taskrunner.store.instances import Instances, new_instance_id
from taskrunner.store.metrics import Metrics
from taskrunner.store.stream import RedisStreamQueue
from taskrunner.task import Dispatched, Registry, Task, default_registry

if TYPE_CHECKING:
    from taskrunner.parts import Parts

State = Literal["init", "starting", "started", "stopping", "stopped"]

DEFAULT_URL: Final = "redis://localhost:6379/0"
_REPLICATIONS_CACHED: Final = 10.0

log = logging.getLogger("taskrunner.runner")


class TaskRunner:
    """One instance: dispatches tasks, and runs them once started.

    Making one starts and sends nothing, so a web process can hold one to dispatch with. The first
    one made in a process serves `.delay()` of the tasks in its registry; `make_default` changes
    that.

    `client` is a `redis.Redis` or a URL; without one the environment variable TASKRUNNER_REDIS_URL
    is used, else redis://localhost:6379/0. `settings` are fields of `TaskRunnerConfig`.

    `dead_letters` and `delayed` are what failed for good and what waits for its time; `config`,
    `queue`, `registry` and `instance_id` can be read.
    """

    def __init__(
        self,
        config: TaskRunnerConfig | None = None,
        client: "redis.Redis | str | None" = None,
        queue: RedisStreamQueue | None = None,
        *,
        registry: Registry = default_registry,
        **settings: Unpack[Settings],
    ) -> None:
        self.config = TaskRunnerConfig.from_settings(config, settings)
        if queue is None:
            if client is None:
                client = os.environ.get("TASKRUNNER_REDIS_URL") or DEFAULT_URL
            queue = RedisStreamQueue(client)
        elif not isinstance(queue, RedisStreamQueue):
            raise ConfigurationError(f"queue={quoted(queue)} is not a RedisStreamQueue")
        self.queue = queue
        self.registry = registry
        self.instance_id = new_instance_id()
        self._connections: Connections = queue.connections
        group = self.config.consumer_group
        self.dead_letters = DeadLetters(self._connections, queue.stream, group)
        self.delayed = DelayedSet(self._connections, queue.stream, group)
        self._dispatcher: Sender = StreamDispatcher(
            self._connections,
            queue.stream,
            group,
            reclaim_delay=queue.reclaim_delay,
            max_payload_bytes=self.config.max_payload_bytes,
        )
        self._metrics = Metrics(
            self._connections,
            queue.stream,
            queue.ring,
            group,
            delete_on_ack=queue.delete_on_ack,
        )
        self._instances = Instances(self._connections, queue.for_group(group))
        self._replications: tuple[float, int] | None = None
        self._reports = Reports(hook=self.config.on_error is not None)
        self._observers = Observers()
        self._state: State = "init"
        self._lock = threading.Lock()
        self._parts: Parts | None = None
        self._ended = threading.Event()
        self._notify: Callable[[], None] | None = None  # wakes run_forever
        self._fatal: Exception | None = None
        self._forever = False
        if registry.dispatcher is None:
            self.make_default()
        _forget_in_children(self)

    def __repr__(self) -> str:
        return f"<TaskRunner group={self.config.consumer_group!r} {self.state} on {self.queue!r}>"

    # --- dispatch ---

    def make_default(self) -> None:
        """Have this runner serve `.delay()` of the tasks in its registry."""
        self.registry.dispatcher = self._dispatcher

    def register(self, task: Task[Any]) -> None:
        """Add a task to this runner's registry."""
        self.registry.register(task)

    def dispatch(
        self,
        name: str,
        payload: Any = None,
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
    ) -> Dispatched:
        """Dispatch a registered task by its name; see `Task.delay`."""
        return self._dispatcher.dispatch(self._task(name), payload, run_at=run_at, run_in=run_in)

    def dispatch_many(
        self,
        name: str,
        payloads: Iterable[Any],
        *,
        run_at: datetime | float | None = None,
        run_in: Duration | None = None,
    ) -> list[Dispatched | None]:
        """Dispatch many messages of a registered task; see `Task.delay_many`."""
        return self._dispatcher.dispatch_many(
            self._task(name), payloads, run_at=run_at, run_in=run_in
        )

    def _task(self, name: str) -> Task[Any]:
        task = self.registry.get(name)
        if task is None:
            raise TaskNotFoundError(
                f"no task {name!r} is registered here; known: {', '.join(self.registry.names()) or 'none'}"
            )
        return task

    def observe(self, observer: Observer) -> None:
        """Tell an observer of what happens here, from the next start on. The hooks in the
        configuration are called as ever.

        Raises AlreadyStartedError while the runner runs.
        """
        with self._lock:
            if self._state not in ("init", "stopped"):
                raise AlreadyStartedError(
                    f"the runner is {self._state}; add observers before it starts"
                )
            serves = self.registry.dispatcher is self._dispatcher
            self._dispatcher = observer.sender(self._dispatcher)
            if serves:
                self.registry.dispatcher = self._dispatcher
            self._observers.add(observer)
            self._reports.listener = self._observers.reported

    # --- what it knows ---

    @property
    def state(self) -> State:
        """Where in its life the runner is."""
        return self._state

    @property
    def errors(self) -> deque[ErrorReport]:
        """What went wrong lately, newest last; bounded."""
        return self._reports.recent

    @property
    def host(self) -> str:
        """The name this instance lives under; the wanted one until Redis gave it."""
        parts = self._parts
        return parts.host if parts else self.config.host

    @property
    def is_leader(self) -> bool:
        """Whether this instance leads its group now. Asks nobody."""
        parts = self._parts
        return parts is not None and parts.elector.is_leader()

    @property
    def workers(self) -> int:
        """Present capacity of the pool."""
        parts = self._parts
        return parts.pool.size if parts else self.config.num_workers

    def silence(self) -> float:
        """Seconds since each fetcher was last answered, or had no room to read into; infinite
        before the first answer and when stopped. Asks nobody."""
        parts = self._parts
        if parts is None:
            return math.inf
        return monotonic() - min(fetcher.heard for fetcher in parts.fetchers)

    def load(self) -> Load:
        """What this instance holds and does now; nothing while it is not started. Asks nobody."""
        parts = self._parts
        return Load() if parts is None else parts.load()

    def server_time(self) -> float:
        """Redis's clock in unix seconds, as last measured; ours before that. Asks nobody."""
        parts = self._parts
        return clock.now() if parts is None else parts.clock.now()

    def replications(self) -> int:
        """How many instances share the group: those whose readers exist and whose presence key
        lives; cached 10 s."""
        counted = self._replications
        if counted is None or monotonic() - counted[0] > _REPLICATIONS_CACHED:
            self._replications = counted = (monotonic(), self._instances.replications())
        return counted[1]

    def stats(self) -> Stats:
        """The group's figures now, from one round trip (two when the count of instances is older
        than 10 s; some more on servers before 7.0, or where finished entries stay)."""
        snapshot = self._metrics.snapshot()
        return compute(
            sums=snapshot.sums,
            counts=snapshot.counts,
            queue_length=snapshot.queue_length,
            waiting=snapshot.waiting,
            workers=self.workers,
            replications=self.replications(),
            threshold=self.config.long_queue_threshold,
        )

    # --- life ---

    def start(self) -> None:
        """Start every thread and return; an unreachable Redis is waited for in the background.

        Raises AlreadyStartedError unless the runner is new or stopped.
        """
        from taskrunner.parts import Parts  # not at the top: a producer needs none of it

        with self._lock:
            if self._state not in ("init", "stopped"):
                raise AlreadyStartedError(f"the runner is {self._state}; stop() it first")
            self._fatal = None
            self._ended.clear()
            if self._state == "stopped":  # the last words of the former life must not meet this one
                self.instance_id = new_instance_id()
            self._state = "starting"
            parts = Parts(
                config=self.config,
                queue=self.queue,
                registry=self.registry,
                delayed=self.delayed,
                reports=self._reports,
                observers=self._observers,
                instance_id=self.instance_id,
                metrics=self._metrics,
                stats=self.stats,
                give_up=self._give_up,
                left=self._left,
            )
            try:
                parts.start()
            except BaseException:
                parts.abandon()
                self._state = "stopped"
                raise
            self._parts = parts
            self._state = "started"
        log.info(
            "group %s started: %d workers on %s",
            self.config.consumer_group, parts.pool.size, self.queue,
            extra={"action": "runner_started"},
        )  # fmt: skip

    def stop(self, timeout: Duration | None = None) -> bool:
        """Stop: fetch nothing more, hand back the unstarted, let running tasks end; whether they
        all did.

        `timeout` in seconds, None: shutdown_timeout. When it returns False the running tasks go on,
        renewed and settled, until they end or the process does. Of a runner that was never started
        it closes the connections that dispatching has opened; the next dispatch opens another.
        """
        seconds = (
            self.config.shutdown_timeout
            if timeout is None
            else max(0.0, to_seconds(timeout, "timeout"))
        )
        return self._stop(seconds, exiting=False)

    def stop_soon(self) -> None:
        """Begin to stop, as a first SIGTERM does, and return; `run_forever` returns when it is
        done."""
        if self._state not in ("starting", "started"):  # one that starts is stopped right after
            return
        exiting = self._forever
        Once("stop", lambda: self._stop(self.config.shutdown_timeout, exiting=exiting)).start()

    def _stop(self, timeout: float, *, exiting: bool) -> bool:
        deadline = monotonic() + timeout
        with self._lock:
            parts = self._parts
            if parts is None or self._state in ("init", "stopped"):
                self._connections.close()
                return True
            self._state = "stopping"
        drained = False
        try:
            drained = parts.stop(deadline, exiting=exiting)
        finally:
            if drained or exiting:
                self._left(parts)
        return drained

    def _left(self, parts: "Parts") -> None:
        if self._parts is parts:
            self._parts = None
            self._state = "stopped"
            # Said first: what waits for the end may be the last thread of the process.
            log.info(
                "group %s stopped", self.config.consumer_group, extra={"action": "runner_stopped"}
            )
            self._ended.set()
            if self._notify is not None:
                self._notify()

    def _give_up(self, error: Exception) -> None:
        """A thread can't be kept, or Redis can't be used at all."""
        if self._fatal is not None:
            return
        self._fatal = error
        log.critical("giving up: %s", describe(error), extra={"action": "runner_gave_up"})
        self._reports.add("runner_gave_up", error)
        exiting = self._forever
        Once("give-up", lambda: self._stop(self.config.shutdown_timeout, exiting=exiting)).start()

    def _run_with_signals(self) -> None:
        with Signals(lambda: self._stop(self.config.shutdown_timeout, exiting=True)) as signals:
            self._notify = signals.wake
            try:
                self.start()
                signals.wait(self._ended.is_set)
            finally:
                self._notify = None

    def _forget(self) -> None:
        """In a forked child none of the threads lives: the runner is new there, can dispatch and be
        started."""
        self._parts = None
        self._state = "init"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._notify = None
        self._fatal = None
        self._forever = False
        self.instance_id = new_instance_id()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def run_forever(self) -> None:
        """Start, and stay until a signal (SIGTERM, SIGINT) or `stop()`; for a worker process.

        The first signal stops in order, the second ends the process at once with 128 + its number.
        In another than the main thread no signal handler is set. Handlers that were there are put
        back. Raises SystemExit(1) when the runner had to give up, AlreadyStartedError when it runs
        already.
        """
        self._forever = True
        try:
            if threading.current_thread() is threading.main_thread():
                self._run_with_signals()
            else:
                self.start()
                self._ended.wait()
        finally:
            self._forever = False
        if self._fatal is not None:
            raise SystemExit(1)


def _forget_in_children(runner: TaskRunner) -> None:
    """Reset the runner in every forked child, for as long as it exists."""
    reference = weakref.WeakMethod(runner._forget)  # pyright: ignore[reportPrivateUsage]

    def forget() -> None:
        method = reference()
        if method is not None:
            method()

    os.register_at_fork(after_in_child=forget)
