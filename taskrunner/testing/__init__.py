"""Floor 5: for users' tests: tasks that run inside the test, on memory (`eager`) or on a server
(`drain`), by a clock that can be moved.

Both run the real code: encoding, registry, executor, retries, settlement. The pytest fixtures are
in the top-level module `taskrunner_pytest`, which imports nothing of this before a test asks.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, Unpack, cast

from taskrunner import clock as clocks
from taskrunner import keys
from taskrunner.clock import Duration
from taskrunner.clock import seconds as to_seconds
from taskrunner.config import Settings
from taskrunner.errors import AlreadyStartedError, ConfigurationError
from taskrunner.runner import TaskRunner
from taskrunner.store.connection import Connections
from taskrunner.store.dead_letters import DeadLetters
from taskrunner.store.delayed_set import DelayedSet
from taskrunner.task import Registry, default_registry
from taskrunner.testing.inline import (
    Drained,
    DrainTimeoutError,
    Failure,
    Inline,
    MovableClock,
    Run,
    TasksFailedError,
)
from taskrunner.testing.memory import Memory

__all__ = [
    "DrainTimeoutError",
    "Drained",
    "Eager",
    "Failure",
    "MovableClock",
    "Run",
    "TasksFailedError",
    "clean_up",
    "drain",
    "eager",
]

_TIMEOUT: Final = 10.0


def eager(
    runner: TaskRunner | None = None,
    *,
    registry: Registry = default_registry,
    clock: MovableClock | None = None,
    hold: bool = False,
    raises: bool = True,
    **settings: Unpack[Settings],
) -> "Eager":
    """Run tasks inside `.delay()`, without a server: `with eager(runner) as tasks: ...`.

    With `runner`, an application's own, its settings, hooks, handler and queue hold, and whatever
    is asked of it is answered from memory. Without one, `settings` are fields of TaskRunnerConfig,
    and the tasks of `registry` run. With `hold` nothing runs before `drain()`.

    A first attempt runs before `.delay()` returns; what it dispatches runs next. What has to wait
    (a retry, `run_in`, `run_at`) waits until `clock` is moved. When the block ends well and tasks
    failed for good, TasksFailedError is raised, unless `raises=False`.

    Raises AlreadyStartedError for a runner that is started, and ConfigurationError.
    """
    if runner is None:
        before = registry.dispatcher
        runner = TaskRunner(
            client="redis://eager.invalid",  # never connected to
            registry=registry,
            **cast(Settings, {"consumer_group": "eager", **settings}),
        )
        registry.dispatcher = before
    elif settings:
        raise ConfigurationError(
            f"{next(iter(settings))} is set beside a runner, which has its own settings"
        )
    return Eager(runner, clock or MovableClock(), hold=hold, raises=raises)


class Eager:
    """The block in which tasks run inside `.delay()`, and what happened in it; made by `eager`."""

    def __init__(
        self, runner: TaskRunner, clock: MovableClock, *, hold: bool, raises: bool
    ) -> None:
        self.runner = runner
        self.clock = clock
        self.raises = raises
        self._hold = hold
        self._memory = Memory(clock.now)
        self._inline: Inline | None = None
        self._open = False
        queue, group = runner.queue, runner.config.consumer_group
        connections = copy.copy(queue.connections)  # they answer from memory after the block too
        vars(connections).update(self._redirections())
        self.dead_letters = DeadLetters(connections, queue.stream, group)
        """The block's dead letters: `list()`, `get(id)`, `requeue(id)`, …"""
        self.delayed = DelayedSet(connections, queue.stream, group)
        """The block's delayed messages: `list()`, `get(id)`, `cancel(id)`, …"""
        self._undo: list[Callable[[], object]] = []

    @property
    def runs(self) -> list[Run]:
        """Every attempt so far, in order."""
        return self._parts.runs

    @property
    def failures(self) -> list[Failure]:
        """What failed for good so far, with a handler or without."""
        return self._parts.reports.failures

    @property
    def waiting(self) -> int:
        """How many messages wait for the clock, or for `drain()`."""
        return self._parts.waiting()

    def drain(
        self, *, everything: bool = False, raises: bool = False, timeout: Duration = _TIMEOUT
    ) -> Drained:
        """Run what waits and is due; with `everything` the clock goes on until nothing waits.

        With `raises`, TasksFailedError for what failed for good. DrainTimeoutError after `timeout`
        seconds, looked at between two tasks.
        """
        return _drained(
            self._parts, self._memory.adopt, everything=everything, raises=raises, timeout=timeout
        )

    def __enter__(self) -> Self:
        runner, registry = self.runner, self.runner.registry
        if self._inline is not None:
            raise RuntimeError("an eager block is entered once: make another with eager()")
        if runner.state not in ("init", "stopped"):
            raise AlreadyStartedError(
                f"the runner is {runner.state}: eager mode takes its place, stop() it first"
            )
        connections = vars(runner.queue.connections)
        if "call" in connections:
            raise RuntimeError("this runner is in an eager block already")
        runner.errors.clear()
        memory = cast(Connections, self._memory)
        self._inline = Inline(runner, memory, self.clock, own_clock=True)
        redirections = self._redirections()
        connections.update(redirections)
        self._undo.append(lambda: [connections.pop(name) for name in redirections])
        before, wall = registry.dispatcher, clocks.now
        runner.make_default()
        self._undo.append(lambda: setattr(registry, "dispatcher", before))
        clocks.now = self.clock.now
        self._undo.append(lambda: setattr(clocks, "now", wall))
        self.clock.listen(self._moved)
        self._undo.append(lambda: self.clock.listen(None))
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        self._parts.close()
        while self._undo:
            self._undo.pop()()
        if error is None and self.raises and self.failures:
            raise TasksFailedError(list(self.failures))

    @property
    def _parts(self) -> Inline:
        if self._inline is None:
            raise RuntimeError("the eager block is not entered: with eager() as tasks: ...")
        return self._inline

    def _redirections(self) -> dict[str, Callable[..., Any]]:
        """What takes the place of the methods of `Connections`."""

        def around(method: Callable[..., Any]) -> Callable[..., Any]:
            def answer(*args: Any, **kwargs: Any) -> Any:
                reply = method(*args, **kwargs)
                if self._open and not (self._hold or self._parts.busy):
                    self._parts.run_new()
                return reply

            return answer

        memory = self._memory
        return {
            "call": around(memory.call),
            "calls": around(memory.calls),
            "run": around(memory.run),
            "open": memory.open,
        }

    def _moved(self) -> None:
        if not (self._hold or self._parts.busy):
            self.drain()


def drain(
    runner: TaskRunner,
    *,
    clock: MovableClock | None = None,
    everything: bool = False,
    raises: bool = True,
    timeout: Duration = _TIMEOUT,
) -> Drained:
    """Run what waits in a runner's Redis, in this thread, as its workers would; no worker is
    needed.

    Runs what is on the stream, retries and delayed messages that are due, and what they dispatch.
    With `clock`, also what is due by it, in order; with `everything`, whatever waits, however far
    off. What a living worker holds is its own.

    Raises TasksFailedError when tasks failed for good, unless `raises=False`; DrainTimeoutError
    after `timeout` seconds, looked at between two tasks; the Redis client's errors as they are.
    """
    inline = Inline(runner, runner.queue.connections, clock or MovableClock(), own_clock=False)
    try:
        return _drained(inline, lambda: None, everything=everything, raises=raises, timeout=timeout)
    finally:
        with suppress(Exception):  # Redis may be away, which is raised already
            inline.close()


def clean_up(runner: TaskRunner) -> None:
    """Delete all that a runner's queue and group have in Redis, and release its unique locks.

    For a runner that is stopped. A unique lock whose message is gone already runs out by itself.
    """
    queue, group = runner.queue, runner.config.consumer_group
    queue.purge()
    for delayed in runner.delayed.list(max(1, len(runner.delayed))):
        runner.delayed.cancel(delayed.id)
    queue.connections.call(
        "DEL",
        *(queue.stream, queue.ring, keys.delayed(group), keys.dead_letters(group)),
        *(keys.metrics(group), keys.capacity(group), keys.leader(group)),
    )


def _drained(
    inline: Inline,
    adopt: Callable[[], None],
    *,
    everything: bool,
    raises: bool,
    timeout: Duration,
) -> Drained:
    runs, failures = len(inline.runs), len(inline.reports.failures)
    inline.run_due(everything=everything, timeout=to_seconds(timeout, "timeout"), adopt=adopt)
    done = Drained(
        runs=inline.runs[runs:],
        failures=inline.reports.failures[failures:],
        waiting=inline.waiting(),
    )
    if raises and done.failures:
        raise TasksFailedError(done.failures)
    return done
