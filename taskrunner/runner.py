"""Floor 5: TaskRunner: builds the parts, starts them in order, stops them in order; no logic of its own.

Stopping has three stages: *quiet*, no new work enters; *drain*, running tasks end while heartbeats go on and the unstarted
goes back; *leave*, what is settled is sent, lease and presence are given up.
"""

import copy
import logging
import os
import select
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from types import FrameType, TracebackType
from typing import Any, Final, Literal, Self

import redis

from taskrunner import keys
from taskrunner.clock import Duration, ServerClock, monotonic
from taskrunner.clock import seconds as to_seconds
from taskrunner.config import TaskRunnerConfig
from taskrunner.dispatcher import StreamDispatcher
from taskrunner.errors import AlreadyStartedError, ConfigurationError, TaskNotFoundError, describe
from taskrunner.executor import Executor
from taskrunner.in_flight import ByteBudget, InFlight
from taskrunner.reports import ErrorReport, Health, Reports
from taskrunner.service import Service
from taskrunner.services.delayed_poller import DelayedPoller
from taskrunner.services.delivery_heartbeat import DeliveryHeartbeat
from taskrunner.services.elector import Elector
from taskrunner.services.fetcher import Fetcher
from taskrunner.services.instance_heartbeat import InstanceHeartbeat
from taskrunner.services.janitor import Janitor
from taskrunner.services.listener import Listener
from taskrunner.services.once import Once
from taskrunner.services.reclaimer import Reclaimer
from taskrunner.services.reporter import Reporter
from taskrunner.services.time_limits import TimeLimits
from taskrunner.services.watchdog import Watchdog
from taskrunner.settler import Park, Settler, hand_back
from taskrunner.store import connection
from taskrunner.store.connection import Connections
from taskrunner.store.dead_letters import DeadLetters
from taskrunner.store.delayed_set import DelayedSet
from taskrunner.store.instances import Instances, OwnedKey, new_instance_id
from taskrunner.store.stream import RedisStreamQueue
from taskrunner.store.unique import UniqueLocks
from taskrunner.task import Dispatched, Registry, Task, default_registry
from taskrunner.timings import Timings
from taskrunner.worker_pool import WorkerPool

State = Literal["init", "starting", "started", "stopping", "stopped"]

DEFAULT_URL: Final = "redis://localhost:6379/0"
_LEAVE: Final = 1.0
"""Seconds beyond the timeout for the last words to Redis; it may be away."""

_CUT_OFF: Final = 3.0
"""Seconds until a task cut off at the end of shutdown_timeout is due elsewhere."""

log = logging.getLogger("taskrunner.runner")


class TaskRunner:
    """One instance: dispatches tasks, and runs them once started.

    Making one starts and sends nothing, so a web process can hold one to dispatch with. The first one made in a process
    serves `.delay()` of the tasks in its registry; `make_default` changes that.

    `client` is a `redis.Redis` or a URL; without one the environment variable TASKRUNNER_REDIS_URL is used, else
    redis://localhost:6379/0. `settings` are fields of `TaskRunnerConfig`.
    """

    def __init__(
        self,
        config: TaskRunnerConfig | None = None,
        client: "redis.Redis | str | None" = None,
        queue: RedisStreamQueue | None = None,
        *,
        registry: Registry = default_registry,
        **settings: Any,
    ) -> None:
        self.config = TaskRunnerConfig.from_settings(config, settings)
        if queue is None:
            if client is None:
                client = os.environ.get("TASKRUNNER_REDIS_URL") or DEFAULT_URL
            queue = RedisStreamQueue(client)
        elif not isinstance(queue, RedisStreamQueue):
            raise ConfigurationError(f"queue={queue!r} is not a RedisStreamQueue")
        self.queue = queue
        self.registry = registry
        self.instance_id = new_instance_id()
        self._connections: Connections = queue.connections
        group = self.config.consumer_group
        self.dead_letters = DeadLetters(self._connections, queue.stream, group)
        self.delayed = DelayedSet(self._connections, queue.stream, group)
        self._dispatcher = StreamDispatcher(
            self._connections,
            queue.stream,
            group,
            reclaim_delay=queue.reclaim_delay,
            max_payload_bytes=self.config.max_payload_bytes,
        )
        self._reports = Reports(hook=self.config.on_error is not None)
        self._state: State = "init"
        self._lock = threading.Lock()
        self._parts: _Parts | None = None
        self._ended = threading.Event()
        self._notify: Callable[[], None] | None = None  # wakes run_forever
        self._fatal: Exception | None = None
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
        return (parts.instance.host if parts else None) or self.config.host

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

    def replications(self) -> int:
        """How many instances share the group."""
        return Instances(
            self._connections, self.queue.for_group(self.config.consumer_group)
        ).replications()

    # --- life ---

    def start(self) -> None:
        """Start every thread and return; an unreachable Redis is waited for in the background.

        Raises AlreadyStartedError unless the runner is new or stopped.
        """
        with self._lock:
            if self._state not in ("init", "stopped"):
                raise AlreadyStartedError(f"the runner is {self._state}; stop() it first")
            self._state = "starting"
            self._fatal = None
            self._ended.clear()
            parts = _Parts(self)
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
        """Stop: fetch nothing more, hand back the unstarted, let running tasks end; whether they all did.

        `timeout` in seconds, None: shutdown_timeout. When it returns False the running tasks go on, renewed and settled,
        until they end or the process does.
        """
        seconds = (
            self.config.shutdown_timeout
            if timeout is None
            else max(0.0, to_seconds(timeout, "timeout"))
        )
        return self._stop(seconds, exiting=False)

    def _stop(self, timeout: float, *, exiting: bool) -> bool:
        deadline = monotonic() + timeout
        with self._lock:
            parts = self._parts
            if parts is None or self._state in ("init", "stopped"):
                return True
            self._state = "stopping"
        drained = parts.stop(deadline, exiting=exiting)
        if drained or exiting:
            self._left(parts)
        return drained

    def _left(self, parts: "_Parts") -> None:
        if self._parts is parts:
            self._parts = None
            self._state = "stopped"
            self._ended.set()
            if self._notify is not None:
                self._notify()
            log.info(
                "group %s stopped", self.config.consumer_group, extra={"action": "runner_stopped"}
            )

    def _give_up(self, error: Exception) -> None:
        """A thread can't be kept, or Redis can't be used at all."""
        if self._fatal is not None:
            return
        self._fatal = error
        log.critical("giving up: %s", describe(error), extra={"action": "runner_gave_up"})
        self._reports.add("runner_gave_up", error)
        Once("give-up", lambda: self._stop(self.config.shutdown_timeout, exiting=False)).start()

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

        The first signal stops in order, the second ends the process at once with 128 + its number. In another than the
        main thread no signal handler is set. Handlers that were there are put back. Raises SystemExit(1) when the runner
        had to give up, AlreadyStartedError when it runs already.
        """
        if threading.current_thread() is threading.main_thread():
            with _Signals(self) as signals:
                self.start()
                signals.wait()
        else:
            self.start()
            self._ended.wait()
        if self._fatal is not None:
            raise SystemExit(1)


class _Signals:
    """The main thread's signal handlers and its wait.

    A signal may be delivered to any thread, while Python handlers run in the main one only: the wake-up pipe gets it out of
    its sleep. Stopping happens in a thread of its own, so that a second signal is heard at any moment.
    """

    _NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner
        self._seen = 0
        self._stopper: Once | None = None

    def __enter__(self) -> "_Signals":
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._former_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._handle) for number in self._NUMBERS}
        self._runner._notify = self._wake
        return self

    def __exit__(self, *args: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._runner._notify = None
        os.close(self._read)
        os.close(self._write)

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._write, b"\0")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._seen += 1
        name = signal.Signals(number).name
        if self._seen > 1:
            # No lock may be taken here: the main thread may be anywhere. What ran stays pending and is reclaimed.
            with suppress(OSError):
                os.write(2, f"taskrunner: second signal ({name}), ending at once\n".encode())
            os._exit(128 + number)
        self._number = name

    def wait(self) -> None:
        """Until the runner has stopped."""
        runner = self._runner
        while not runner._ended.is_set():
            if self._seen and self._stopper is None:
                log.info(
                    "%s: stopping in order, up to %g s; a second signal ends at once",
                    self._number, runner.config.shutdown_timeout, extra={"action": "runner_stopping"},
                )  # fmt: skip
                self._stopper = Once(
                    "stop", lambda: runner._stop(runner.config.shutdown_timeout, exiting=True)
                )
                self._stopper.start()
            select.select([self._read], [], [], 0.5)
            with suppress(OSError):
                os.read(self._read, 4096)


class _Parts:
    """Everything one start makes; thrown away by the stop."""

    def __init__(self, runner: TaskRunner) -> None:
        config, queue = runner.config, runner.queue
        group = config.consumer_group
        timings = config.timings
        self._runner = runner
        self._connections = connections = queue.connections
        self.reports = reports = runner._reports
        self.health = health = Health(reports, connection.lost)
        self.deliveries = deliveries = queue.for_group(group)
        self.stop_asked = threading.Event()
        self.in_flight = in_flight = InFlight()
        self.timings = Timings()
        self.clock = ServerClock()
        instances = Instances(connections, deliveries)
        self.instance = InstanceHeartbeat(
            health,
            instances=instances,
            deliveries=deliveries,
            clock=self.clock,
            wanted_host=config.host,
            instance_id=runner.instance_id,
            readers=config.num_fetchers + 1,
            ttl=timings.presence,
            give_up=runner._give_up,
        )
        self.settler = settler = Settler(
            health,
            in_flight=in_flight,
            deliveries=deliveries,
            reports=reports,
            busy=lambda: not self.pool.idle,
            host=lambda: runner.host,
            parked=lambda entry_id, due: self.reclaimer.schedule(entry_id, due),
            settled_alone=lambda: self.reclaimer.settled_alone(),
            most_waiting=2 * config.batch_size,
            dead_letter_limit=config.dead_letter_limit,
        )
        self.limits = TimeLimits(health)
        executor = Executor(
            registry=runner.registry,
            config=config,
            group=group,
            reclaim_delay=queue.reclaim_delay,
            in_flight=in_flight,
            settler=settler,
            locks=UniqueLocks(connections),
            limits=self.limits,
            timings=self.timings,
            reports=reports,
            confirm=lambda: self.heartbeat.wake(),
            renew_early=lambda: self.heartbeat.wake(),
            stopping=self.stop_asked.is_set,
        )
        size = config.min_workers if config.tuning else config.num_workers
        assert size is not None
        self.pool = WorkerPool(executor, size=size, batch_size=config.batch_size)
        self.heartbeat = DeliveryHeartbeat(
            health,
            deliveries=deliveries,
            instance=self.instance,
            in_flight=in_flight,
            pool=self.pool,
            settler=settler,
            reports=reports,
            reclaim_delay=queue.reclaim_delay,
            hand_back_after=timings.hand_back_after,
        )
        budget = ByteBudget(in_flight, config.max_payload_bytes)
        self.fetchers = [
            Fetcher(
                health,
                number=number,
                deliveries=deliveries,
                instance=self.instance,
                in_flight=in_flight,
                pool=self.pool,
                settler=settler,
                budget=budget,
                batch_size=config.batch_size,
                block=config.block_duration,
            )
            for number in range(1, config.num_fetchers + 1)
        ]
        self.reclaimer = Reclaimer(
            health,
            number=config.num_fetchers + 1,
            deliveries=deliveries,
            instance=self.instance,
            instances=instances,
            in_flight=in_flight,
            pool=self.pool,
            settler=settler,
            heartbeat=self.heartbeat,
            fetchers=self.fetchers,
            budget=budget,
            reclaim_delay=queue.reclaim_delay,
        )
        self.elector = Elector(
            health,
            lease=OwnedKey(connections, keys.leader(group), runner.instance_id),
            ttl=timings.lease,
            poll=timings.poll,
            channel=keys.channel(group),
            won=lambda: self.poller.wake(),
        )
        self.poller = DelayedPoller(
            health,
            delayed=runner.delayed,
            elector=self.elector,
            registry=runner.registry,
            reports=reports,
            timings=self.timings,
            reclaim_delay=queue.reclaim_delay,
            poll=timings.poll,
            dead_letter_limit=config.dead_letter_limit,
        )
        self.listener = Listener(
            health,
            connections=connections,
            channel=keys.channel(group),
            due=self.poller.wake,
            released=self.elector.wake,
        )
        self.janitor = Janitor(
            health,
            deliveries=deliveries,
            elector=self.elector,
            interval=timings.janitor,
            consumer_idle=timings.consumer_idle,
            trims=queue.delete_on_ack,
        )
        self.reporter = (
            Reporter(health, reports, config.on_error) if config.on_error is not None else None
        )
        self.watchdog = Watchdog(
            health,
            services=lambda: self.services,
            pool=self.pool,
            reports=reports,
            give_up=runner._give_up,
            after=self._finish_late,
        )
        self.services: list[Service] = [
            *([self.reporter] if self.reporter else []),
            self.instance,
            self.elector,
            self.heartbeat,
            self.settler,
            self.limits,
            *self.fetchers,
            self.reclaimer,
            self.poller,
            self.listener,
            self.janitor,
        ]
        self._late = False
        self._leaving = threading.Lock()
        self._gone = False

    def start(self) -> None:
        """Start all threads."""
        self.pool.start()
        for service in self.services:
            service.start()
        self.watchdog.start()

    def abandon(self) -> None:
        """A start that failed half way: nothing is left running."""
        for service in (self.watchdog, *self.services):
            service.stop()
        self.pool.stop()

    def stop(self, deadline: float, *, exiting: bool) -> bool:
        """Quiet, drain, leave; whether every running task ended by the deadline."""
        self.stop_asked.set()
        self._quiet(deadline)
        drained = self.pool.join(max(0.0, deadline - monotonic()))
        if not drained and not exiting:
            self._late = True  # the watchdog sees the last task end
            return False
        if not drained:
            self._cut_off()
        leave = Once("leave", lambda: self._leave(max(deadline, monotonic()) + _LEAVE))
        leave.start()
        leave.join(max(0.0, deadline - monotonic()) + _LEAVE)
        return drained

    def _quiet(self, deadline: float) -> None:
        readers = (*self.fetchers, self.reclaimer)
        for service in (*readers, self.poller, self.janitor, self.listener):
            service.stop()
        self.listener.interrupt()
        hurry = min(deadline, monotonic() + 1.0)
        while not all(reader.join(0.02) for reader in self.fetchers):
            for fetcher in self.fetchers:
                if fetcher.alive:
                    fetcher.unblock() if monotonic() < hurry else fetcher.interrupt()
            if monotonic() > max(hurry, deadline) + _LEAVE / 2:
                break
        self.reclaimer.join(max(0.1, min(deadline, monotonic() + 1.0) - monotonic()))
        for delivery in self.pool.take_back(self.pool.buffered):
            delivery.settlement = hand_back(delivery)
            self.settler.put(delivery)
        for delivery in self.in_flight.snapshot():
            if delivery.waiting:
                delivery.settlement = hand_back(delivery)
                self.settler.put(delivery)
        self.pool.stop()

    def _cut_off(self) -> None:
        """The process ends before these do: due elsewhere in 3 s, and it cost them no attempt."""
        running = self.pool.running()
        log.warning(
            "%d tasks still run at the end of shutdown_timeout; they will run again elsewhere",
            len(running),
            extra={"action": "runner_cut_off"},
        )
        for delivery in running:
            again = copy.copy(delivery)  # should it end in the meantime, that is settled too
            again.settlement = Park(due=monotonic() + _CUT_OFF, count=max(0, delivery.count - 1))
            self.settler.put(again)

    def _leave(self, deadline: float) -> None:
        """The last words to Redis; each may fail, none may keep us."""
        with self._leaving:
            if self._gone:
                return
            self._gone = True
        self.watchdog.stop()
        self.settler.finish(deadline)
        self.heartbeat.stop()
        self.limits.stop()
        self.elector.stop()
        self.instance.stop()
        self.elector.join(max(0.0, deadline - monotonic()))
        self.instance.join(max(0.0, deadline - monotonic()))
        for step in (self.elector.resign, self.instance.leave):
            with suppress(Exception):  # then the keys run out by themselves
                step()
        if self.reporter is not None:
            self.reporter.stop()
            self.reporter.join(0.5)
        self._connections.close()

    def _finish_late(self) -> None:
        """After a stop that returned False: leave when the last task has ended."""
        if self._late and self.pool.threads_alive == 0:
            self._late = False

            def leave() -> None:
                self._leave(monotonic() + _LEAVE)
                self._runner._left(self)

            Once("leave", leave).start()


def _forget_in_children(runner: TaskRunner) -> None:
    """A forked child has the object but none of its threads: there it is new, and can dispatch or be started."""
    reference = weakref.ref(runner)

    def forget() -> None:
        inherited = reference()
        if inherited is not None:
            inherited._parts = None
            inherited._state = "init"
            inherited._lock = threading.Lock()
            inherited._ended = threading.Event()
            inherited._notify = None
            inherited._fatal = None
            inherited.instance_id = new_instance_id()

    os.register_at_fork(after_in_child=forget)
