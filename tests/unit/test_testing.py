"""Eager mode: tasks run inside `.delay()`, by a clock that the test moves; no server anywhere."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from taskrunner import (
    AlreadyStartedError,
    ConfigurationError,
    ErrorReport,
    InvalidTaskPayloadError,
    PayloadTooLargeError,
    Registry,
    Reject,
    Retry,
    Task,
    TaskAlreadyDispatchedError,
    TaskContext,
    TaskExecutionError,
    TaskMessage,
    TaskNotFoundError,
    TaskRunner,
    TaskTimeoutError,
    UnboundTaskError,
    clock,
    current_task,
    task,
)
from taskrunner.testing import (
    DrainTimeoutError,
    Eager,
    MovableClock,
    TasksFailedError,
    drain,
    eager,
)

UNREACHABLE = "redis://127.0.0.1:1/0"


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def define(registry: Registry) -> Callable[..., Callable[[Any], Task[Any]]]:
    """`@define("name", max_retry=2)`: a task of this test's own."""
    return lambda name, **options: task(name, registry=registry, **options)


Define = Callable[..., Callable[[Any], Task[Any]]]


def attempts(tasks: Eager) -> list[tuple[str, int]]:
    return [(run.task_name, run.attempt) for run in tasks.runs]


# --- running ---


def test_a_task_has_run_when_delay_returns(define: Define, registry: Registry) -> None:
    """The point of it; and what `delay` returns is what it returns elsewhere."""
    seen: list[Any] = []
    save = define("save")(seen.append)

    with eager(registry=registry) as tasks:
        sent = save.delay({"a": (1, 2)})

    assert seen == [{"a": [1, 2]}]  # through the encoder: a tuple is a list afterwards
    assert (sent.task_name, sent.run_at) == ("save", None)
    assert sent.entry_id
    (run,) = tasks.runs
    assert (run.task_name, run.payload, run.attempt, run.error) == ("save", seen[0], 1, None)
    assert run.message.id == sent.id
    assert (tasks.waiting, tasks.failures, len(tasks.dead_letters)) == (0, [], 0)


def test_a_task_gets_a_copy_of_its_payload(define: Define, registry: Registry) -> None:
    """What a task does to its payload is seen by nobody, as between two processes."""
    grow = define("grow")(lambda payload: payload.append(1))
    mine: list[int] = []

    with eager(registry=registry):
        grow.delay(mine)

    assert mine == []


def test_what_a_task_dispatches_runs_after_it(define: Define, registry: Registry) -> None:
    """And before the outer `delay` returns; a long chain needs no deep stack."""
    order: list[Any] = []

    @define("child")
    def child(payload: int) -> None:
        order.append(payload)
        if payload < 2000:
            child.delay(payload + 1)

    @define("parent")
    def parent(payload: Any) -> None:
        child.delay(1999)
        order.append("parent ends")

    with eager(registry=registry):
        parent.delay()

    assert order == ["parent ends", 1999, 2000]
    with eager(registry=registry):
        child.delay(0)
    assert order[-1] == 2000


def test_a_task_that_dispatches_itself_for_ever_is_stopped(
    define: Define, registry: Registry
) -> None:
    """A test that never ends says nothing."""

    @define("again")
    def again() -> None:
        again.delay()

    with eager(registry=registry), pytest.raises(RuntimeError, match="dispatch itself"):
        again.delay()


def test_delay_many_runs_all(define: Define, registry: Registry) -> None:
    """In order; a duplicate of a unique task has no place in it."""
    seen: list[int] = []
    save = define("save", unique_for=60, unique_key=str)(seen.append)

    with eager(registry=registry):
        sent = save.delay_many([1, 2, 1])

    assert seen == [1, 2]
    assert [one is None for one in sent] == [False, False, True]


def test_held_tasks_wait_for_a_drain(define: Define, registry: Registry) -> None:
    """For code that is to be looked at between dispatching and running."""
    save = define("save")(lambda payload: None)

    with eager(registry=registry, hold=True) as tasks:
        save.delay(1)
        save.delay(2, run_in=60)
        tasks.clock.move(10)
        assert (tasks.runs, tasks.waiting) == ([], 2)
        done = tasks.drain()
        assert ([run.payload for run in done.runs], done.waiting) == ([1], 1)
        assert [run.payload for run in tasks.drain(everything=True).runs] == [2]


def test_several_threads_may_dispatch(define: Define, registry: Registry) -> None:
    """Each has its own tasks run before its `delay` returns, also while a task waits for it."""
    done: list[int] = []
    save = define("save")(done.append)

    def send(start: int) -> None:
        for i in range(start, start + 50):
            save.delay(i)
            assert i in done

    @define("outer")
    def outer() -> None:
        threads = [threading.Thread(target=send, args=(n * 50,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    with eager(registry=registry) as tasks:
        outer.delay()

    assert sorted(done) == list(range(200))
    assert len(tasks.runs) == 201


# --- the clock ---


def test_a_retry_waits_for_the_clock(define: Define, registry: Registry) -> None:
    """Nothing sleeps, and no attempt runs before its time."""

    @define("flaky", max_retry=3, retry_delay=lambda attempt, error: 60 * attempt)
    def flaky(payload: Any) -> None:
        if current_task().attempt < 3:
            raise ValueError

    with eager(registry=registry) as tasks:
        flaky.delay()
        assert attempts(tasks) == [("flaky", 1)]
        assert tasks.waiting == 1
        tasks.clock.move(59)
        assert len(tasks.runs) == 1
        tasks.clock.move(1)
        assert len(tasks.runs) == 2
        tasks.clock.move(timedelta(minutes=2))
        assert attempts(tasks) == [("flaky", 1), ("flaky", 2), ("flaky", 3)]
        assert [type(run.error) for run in tasks.runs] == [ValueError, ValueError, type(None)]


def test_what_becomes_due_in_a_move_runs_in_order_at_its_time(
    define: Define, registry: Registry
) -> None:
    """An hour that is skipped is lived through: a retry's retry is due within it too."""
    seen: list[tuple[str, int]] = []
    start = 0.0

    @define("note")
    def note(payload: str) -> None:
        seen.append((payload, round(moved.now() - start)))

    @define("flaky", max_retry=9, retry_delay=1000)
    def flaky(payload: str) -> None:
        note.function(payload)
        raise ValueError

    moved = MovableClock()
    with eager(registry=registry, clock=moved) as tasks:
        start = moved.now()
        note.delay("b", run_in=1500)
        note.delay("a", run_in=500)
        flaky.delay("f")
        moved.move(3600)

    assert seen == [("f", 0), ("a", 500), ("f", 1000), ("b", 1500), ("f", 2000), ("f", 3000)]
    assert round(moved.now() - start) == 3600
    assert tasks.clock is moved


def test_a_retry_without_delay_waits_for_the_clock_too(define: Define, registry: Registry) -> None:
    """One rule, so that no test depends on how long a delay was drawn."""

    @define("flaky", max_retry=2, retry_delay=0)
    def flaky() -> None:
        if current_task().attempt == 1:
            raise ValueError

    with eager(registry=registry) as tasks:
        flaky.delay()
        assert len(tasks.runs) == 1
        tasks.clock.move(0)
        assert len(tasks.runs) == 2


def test_run_at_and_run_in_wait_for_the_clock(define: Define, registry: Registry) -> None:
    """As seen from the code under test, which asks the real clock for its instants."""
    seen: list[str] = []
    save = define("save")(seen.append)

    with eager(registry=registry) as tasks:
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        sent = save.delay("tomorrow", run_at=tomorrow)
        save.delay("past", run_at=datetime.now(UTC))
        save.delay("in an hour", run_in=3600)
        assert sent.run_at == pytest.approx(tomorrow.timestamp(), abs=1e-5)
        assert seen == ["past"]
        assert [waiting.payload for waiting in tasks.delayed.list()] == ["in an hour", "tomorrow"]
        tasks.clock.move(3600)
        assert seen == ["past", "in an hour"]
        tasks.clock.move_to(tomorrow.timestamp())
        assert seen == ["past", "in an hour", "tomorrow"]
        assert save.delay("later", run_in=60).run_at == pytest.approx(
            tomorrow.timestamp() + 60, abs=5
        )


def test_everything_runs_to_the_end(define: Define, registry: Registry) -> None:
    """Whatever backoff was drawn: for tests that only ask how it ends."""

    @define("hopeless", max_retry=20)
    def hopeless() -> None:
        raise ValueError("no")

    with eager(registry=registry, raises=False) as tasks:
        hopeless.delay()
        done = tasks.drain(everything=True)

    assert [run.attempt for run in done.runs] == list(range(2, 21))
    assert done.waiting == 0
    assert [letter.attempts for letter in tasks.failures and done.failures and [_Letter(20)]] == [
        20
    ]


class _Letter:
    def __init__(self, attempts: int) -> None:
        self.attempts = attempts


def test_a_cancelled_message_never_runs(define: Define, registry: Registry) -> None:
    """Operators' calls work as on a server, and release the lock."""
    save = define("save", unique_for=60)(lambda payload: None)

    with eager(registry=registry) as tasks:
        sent = save.delay(1, run_in=60)
        assert tasks.delayed.cancel(sent.id)
        tasks.drain(everything=True)
        assert tasks.runs == []
        save.delay(2)
        assert len(tasks.runs) == 1


def test_a_task_may_move_the_clock(define: Define, registry: Registry) -> None:
    """It stands for one that takes long: what was due meanwhile runs with the next move."""
    tasks: Eager

    @define("long")
    def long() -> None:
        tasks.clock.move(100)

    note = define("note")(lambda payload: None)
    with eager(registry=registry) as tasks:
        note.delay(1, run_in=50)
        long.delay()
        assert tasks.clock.ahead == 100
        assert attempts(tasks) == [("long", 1)]
        tasks.clock.move(0)
        assert attempts(tasks) == [("long", 1), ("note", 1)]


def test_time_does_not_run_backwards() -> None:
    """A lease or a lock of the past would come back to life."""
    with pytest.raises(ValueError, match="below 0"):
        MovableClock().move(-1)


def test_time_stamps_follow_the_moved_clock(define: Define, registry: Registry) -> None:
    """One clock for all: when it was dispatched, when it failed."""

    @define("fails", max_retry=2, retry_delay=100)
    def fails() -> None:
        raise ValueError

    with eager(registry=registry, raises=False) as tasks:
        tasks.clock.move(10_000)
        fails.delay()
        tasks.clock.move(100)
        (letter,) = tasks.dead_letters.list()
        enqueued = tasks.runs[0].message.enqueued_at
        assert enqueued is not None
        assert letter.failed_at - enqueued == pytest.approx(100, abs=5)
        assert tasks.clock.now() - letter.failed_at < 5


# --- failures ---


def test_a_failure_raises_at_the_end_of_the_block(define: Define, registry: Registry) -> None:
    """Not in `delay`, where no production code would meet it, and yet no test passes over it."""

    @define("fails")
    def fails(payload: Any) -> None:
        raise ValueError(payload)

    def block() -> None:
        with eager(registry=registry):
            fails.delay("one")
            fails.delay("two")

    with pytest.raises(TasksFailedError, match=r"ValueError: one \(and 1 more") as caught:
        block()

    assert isinstance(caught.value.__cause__, ValueError)
    assert [failure.task_name for failure in caught.value.failures] == ["fails", "fails"]
    assert all(isinstance(one.error, TaskExecutionError) for one in caught.value.failures)


def test_the_blocks_own_error_goes_before_failures(define: Define, registry: Registry) -> None:
    """The failed assertion is what the reader needs to see."""
    fails = define("fails")(lambda payload: 1 / 0)

    def block() -> None:
        with eager(registry=registry):
            fails.delay()
            raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine"):
        block()


def test_failures_can_be_looked_at(define: Define, registry: Registry) -> None:
    """The dead letter is a real one, and can be put back."""
    broken = [True]

    @define("fails", max_retry=5)
    def fails(payload: Any) -> None:
        if broken:
            raise Reject("no")

    with eager(registry=registry, raises=False) as tasks:
        fails.delay({"a": 1})
        (letter,) = tasks.dead_letters.list()
        assert (letter.payload, letter.error_type, letter.attempts) == ({"a": 1}, "Reject", 1)
        assert "Reject: no" in letter.traceback
        broken.clear()
        tasks.dead_letters.requeue(letter.id)
        assert (len(tasks.runs), len(tasks.dead_letters)) == (2, 0)
        assert tasks.runs[1].attempt == 1


def test_a_drain_can_raise(define: Define, registry: Registry) -> None:
    """For the one place in a test where all has to be well."""
    fails = define("fails")(lambda payload: 1 / 0)

    with eager(registry=registry, hold=True, raises=False) as tasks:
        fails.delay()
        with pytest.raises(TasksFailedError, match="ZeroDivisionError"):
            tasks.drain(raises=True)


def test_a_time_limit_is_kept(define: Define, registry: Registry) -> None:
    """By the real clock: a task that hangs would hang the test."""

    @define("hangs", time_limit=0.02)
    def hangs() -> None:
        while True:
            pass

    with eager(registry=registry, raises=False) as tasks:
        hangs.delay()

    assert isinstance(tasks.failures[0].error, TaskTimeoutError)


def test_system_exit_is_a_failed_attempt(define: Define, registry: Registry) -> None:
    """As in a worker."""

    @define("exits")
    def exits() -> None:
        raise SystemExit(3)

    with eager(registry=registry, raises=False) as tasks:
        exits.delay()

    assert isinstance(tasks.failures[0].error.__cause__, SystemExit)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.fail.Exception("stop")])
def test_what_is_meant_for_the_test_gets_there(
    define: Define, registry: Registry, error: BaseException
) -> None:
    """Ctrl-C ends the run, and `pytest.fail` inside a task fails the test."""

    @define("task")
    def raises() -> None:
        raise error

    with eager(registry=registry, raises=False) as tasks:
        with pytest.raises(type(error)):
            raises.delay()
        assert len(tasks.failures) == 1


def test_unknown_and_unreadable_messages_end_as_dead_letters(registry: Registry) -> None:
    """A name that nobody registered is tried as often as anywhere else."""
    with eager(registry=registry, raises=False) as tasks:
        tasks.runner.queue.add("no JSON")
        tasks.runner.queue.add('{"task_name":"missing","payload":1,"reservation_timeout":1}')
        tasks.drain(everything=True)
        letters = tasks.dead_letters.list()

    assert [letter.error_type for letter in letters] == [
        "InvalidTaskPayloadError",
        "TaskNotFoundError",
    ]


# --- dispatching refuses what it refuses elsewhere ---


@pytest.mark.parametrize(
    ("payload", "options", "error"),
    [
        ({1: 2}, {}, InvalidTaskPayloadError),
        ({"when": datetime(2026, 1, 1)}, {}, InvalidTaskPayloadError),
        (float("nan"), {}, InvalidTaskPayloadError),
        ("x" * 1001, {}, PayloadTooLargeError),
        (1, {"run_at": datetime(2026, 1, 1)}, ValueError),
        (1, {"run_at": 1, "run_in": 1}, ValueError),
        (1, {"run_in": "5"}, TypeError),
    ],
)
def test_delay_raises_as_it_does_elsewhere(
    define: Define,
    registry: Registry,
    payload: Any,
    options: dict[str, Any],
    error: type[Exception],
) -> None:
    """A test that could dispatch anything would find nothing."""
    save = define("save")(lambda payload: None)

    with eager(registry=registry, max_payload_bytes=1000) as tasks:
        with pytest.raises(error):
            save.delay(payload, **options)
        assert tasks.runs == []


def test_a_unique_task_is_locked_while_it_waits(define: Define, registry: Registry) -> None:
    """Over its retries, until it ends; the lock of a lost one runs out by the moved clock."""

    @define("unique", unique_for=60, unique_key="payload", max_retry=2, retry_delay=100)
    def unique(payload: Any) -> None:
        if current_task().attempt == 1:
            raise ValueError

    with eager(registry=registry) as tasks:
        unique.delay(1)
        with pytest.raises(TaskAlreadyDispatchedError, match="'unique' is unique"):
            unique.delay(1)
        unique.delay(2)
        tasks.clock.move(100)
        assert tasks.waiting == 0
        unique.delay(1)
        assert unique.unlock(1)
        assert not unique.unlock(1)
        unique.delay(1)


def test_a_lock_runs_out_by_the_moved_clock(define: Define, registry: Registry) -> None:
    """A message that was deleted by hand holds it no longer than unique_for."""
    unique = define("unique", unique_for=60)(lambda payload: None)

    with eager(registry=registry, hold=True) as tasks:
        unique.delay(1)
        tasks.clock.move(59)
        with pytest.raises(TaskAlreadyDispatchedError):
            unique.delay(2)
        tasks.clock.move(2)
        unique.delay(3)


def test_unique_dead_letters_go_back_under_their_locks(define: Define, registry: Registry) -> None:
    """As they do on a server: one that another message has meanwhile taken stays."""
    broken = [True]

    @define("unique", unique_for=60, unique_key=str)
    def unique(payload: Any) -> None:
        if broken:
            raise Reject("no")

    with eager(registry=registry, raises=False, hold=True) as tasks:
        for payload in ("taken", "free"):
            unique.delay(payload)
        tasks.drain()
        taken, free = tasks.dead_letters.list()
        broken.clear()
        unique.delay("taken")
        with pytest.raises(TaskAlreadyDispatchedError, match=f"dead letter {taken.id} stays"):
            tasks.dead_letters.requeue(taken.id)
        assert tasks.dead_letters.requeue_all() == (1, 1)
        with pytest.raises(TaskAlreadyDispatchedError):
            unique.delay("free")
        with pytest.raises(KeyError):
            tasks.dead_letters.requeue(free.id)
        tasks.drain()
        assert [run.payload for run in tasks.runs[2:]] == ["taken", "free"]
        assert tasks.dead_letters.requeue_all() == (1, 0)
        assert tasks.dead_letters.requeue_all() == (0, 0)
        assert tasks.dead_letters.purge() == 0


def test_what_waits_can_be_deleted_with_its_locks(define: Define, registry: Registry) -> None:
    """One message, and all; their unique tasks can be dispatched at once."""
    unique = define("unique", unique_for=60, unique_key=str)(lambda payload: None)

    with eager(registry=registry, hold=True) as tasks:
        queue = tasks.runner.queue
        assert queue.purge() == 0
        sent = [unique.delay(number) for number in range(3)]
        assert queue.delete(sent[0].entry_id or "")
        assert not queue.delete(sent[0].entry_id or "")
        unique.delay(0)
        assert queue.purge() == 3
        for number in range(3):
            unique.delay(number)
        later = unique.delay("later", run_in=60)
        assert tasks.delayed.cancel(later.id)
        assert not tasks.delayed.cancel(later.id)
        unique.delay("later")
        tasks.drain()
    assert [run.payload for run in tasks.runs] == [0, 1, 2, "later"]


# --- an application's own runner ---


def test_a_runners_settings_and_hooks_hold(define: Define, registry: Registry) -> None:
    """The handler and the hooks are the application's code: they are under test too."""
    told: list[Any] = []

    def handler(message: TaskMessage, error: BaseException) -> None:
        told.append(("handler", message.payload, message.attempt, type(error.__cause__).__name__))

    def after(context: TaskContext, error: BaseException | None) -> None:
        told.append(("after", context.attempt, type(error).__name__))

    def on_error(report: ErrorReport) -> None:
        told.append(("on_error", report.action))

    runner = TaskRunner(
        consumer_group="app",
        client=UNREACHABLE,
        registry=registry,
        failed_task_handler=handler,
        before_task=lambda context: told.append(("before", context.name)),
        after_task=after,
        on_error=on_error,
    )

    @define("fails")
    def fails(payload: Any) -> None:
        told.append("runs")
        raise KeyError(payload)

    with eager(runner, raises=False) as tasks:
        runner.dispatch("fails", 7)
        assert len(runner.dead_letters) == 0
        assert [report.action for report in runner.errors] == ["task_failed"]

    assert told == [
        ("before", "fails"),
        "runs",
        ("after", 1, "KeyError"),
        ("handler", 7, 1, "KeyError"),
        ("on_error", "task_failed"),
    ]
    assert len(tasks.failures) == 1


def test_all_is_as_before_after_the_block(define: Define, registry: Registry) -> None:
    """The next test must not find anything of this one; the real Redis is asked again."""
    runner = TaskRunner(consumer_group="app", client=UNREACHABLE, registry=registry)
    other = TaskRunner(consumer_group="other", client=UNREACHABLE, registry=registry)
    other.make_default()
    before, now = registry.dispatcher, clock.now
    save = define("save")(lambda payload: None)

    for _ in range(2):
        with eager(runner) as tasks:
            save.delay(1)
            assert len(tasks.runs) == 1

    assert registry.dispatcher is before
    assert clock.now is now
    assert len(tasks.dead_letters) == 0  # what the block shows stays in memory
    with pytest.raises(redis.ConnectionError):
        len(runner.queue)


def test_a_block_without_a_runner_leaves_none_behind(define: Define, registry: Registry) -> None:
    """Otherwise a forgotten TaskRunner would go unnoticed in the tests after it."""
    save = define("save")(lambda payload: None)

    with eager(registry=registry):
        save.delay(1)

    with pytest.raises(UnboundTaskError):
        save.delay(1)


def test_a_name_that_is_not_registered_is_refused(registry: Registry) -> None:
    """By the runner itself, as ever."""
    with eager(registry=registry) as tasks, pytest.raises(TaskNotFoundError):
        tasks.runner.dispatch("missing")


def test_current_task_is_filled(define: Define, registry: Registry) -> None:
    """Also its message; outside of a task there is none, though the test runs it."""
    seen: list[Any] = []

    @define("look", max_retry=4)
    def look(payload: Any) -> None:
        here = current_task()
        seen.append((here.name, here.attempt, here.max_retry, here.id, here.message.payload))
        assert (here.lost, here.stopping) == (False, False)
        if here.attempt == 1:
            raise Retry(5)

    with eager(registry=registry) as tasks:
        sent = look.delay("x")
        tasks.clock.move(5)
        with pytest.raises(RuntimeError):
            current_task()

    assert seen == [("look", n, 4, sent.id, "x") for n in (1, 2)]


def test_misuse_says_what_to_do(registry: Registry) -> None:
    """Each text names the way out."""
    runner = TaskRunner(consumer_group="app", client=UNREACHABLE, registry=registry)

    with pytest.raises(ConfigurationError, match="max_payload_bytes is set beside a runner"):
        eager(runner, max_payload_bytes=5)
    with pytest.raises(RuntimeError, match="not entered"):
        _ = eager(runner).runs
    with eager(runner) as tasks:
        with pytest.raises(RuntimeError, match="in an eager block already"), eager(runner):
            pass
        with pytest.raises(RuntimeError, match="entered once"), tasks:
            pass
        with pytest.raises(RuntimeError, match=r"does not know the command 'LRANGE'.*drain"):
            runner.queue.get_metrics()
    with runner, pytest.raises(AlreadyStartedError, match="stop"), eager(runner):
        pass


def test_a_drain_has_a_deadline(define: Define, registry: Registry) -> None:
    """It is looked at between two tasks."""
    again = define("again")(lambda payload: again.delay())

    with eager(registry=registry, hold=True) as tasks:
        again.delay()
        with pytest.raises(DrainTimeoutError, match="not at an end in time"):
            tasks.drain(timeout=0.05)


def test_a_drain_without_a_server_raises_its_error(registry: Registry) -> None:
    """The Redis client's own, as it is."""
    runner = TaskRunner(consumer_group="app", client=UNREACHABLE, registry=registry)

    with pytest.raises(Exception, match="127.0.0.1:1"):
        drain(runner)
