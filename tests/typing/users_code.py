"""What users type, right and wrong, for type checkers only: nothing here is ever run.

Lines that end with `# wrong` must be errors, for mypy --strict and for pyright; all others must not.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypedDict, assert_type

import redis

from taskrunner import (
    DeadLetter,
    DelayedTask,
    Dispatched,
    ErrorReport,
    RedisStreamQueue,
    Registry,
    Reject,
    Retry,
    Stats,
    Task,
    TaskContext,
    TaskMessage,
    TaskRunner,
    TaskRunnerConfig,
    TaskRunnerError,
    Timings,
    current_task,
    task,
)
from taskrunner.testing import Drained, Eager, MovableClock, Run, drain, eager

# --- tasks ---


class Mail(TypedDict):
    to: str


@task
def bare(payload: Mail) -> None: ...


@task("full", max_retry=3, unique_for=timedelta(1), unique_key=lambda payload: payload["to"])
def full(payload: Mail) -> int:
    return 1


@task
def nothing() -> None: ...


@task(time_limit=2)
def nothing_with_options() -> None: ...


@task
def optional(days: int = 30) -> None: ...


def wait(attempt: int, error: BaseException) -> timedelta:
    return timedelta(seconds=attempt)


@task(retry_delay=wait, unique_for=5, unique_key="payload", registry=Registry())
def anything(payload: Any) -> None: ...


class Methods:
    @staticmethod
    @task
    def static(payload: list[int]) -> None: ...


assert_type(bare, Task[Mail])
assert_type(full, Task[Mail])
assert_type(nothing, Task[None])
assert_type(nothing_with_options, Task[None])
assert_type(optional, Task[int | None])
assert_type(anything, Task[Any])
some: Task[Any] = bare


def two(to: str, subject: str) -> None: ...


task(two)  # wrong
task("two")(two)  # wrong
task(retries=3)  # wrong
task(max_retry="3")  # wrong
task(max_lost=None)  # wrong
task(time_limit="5s")  # wrong
task(unique_for=5, unique_key="to")  # wrong
task(unique_for=5, unique_key=lambda payload: 5)  # wrong
task(retry_delay=lambda attempt: 5)  # wrong
task(retry_delay=lambda attempt, error: "5")  # wrong
task(registry="mine")  # wrong
task(5)  # wrong
bare.max_retry = 5  # wrong

# --- dispatching ---

assert_type(bare.delay({"to": "a"}, run_at=datetime.now(UTC)), Dispatched)
assert_type(full.delay_many([{"to": "a"}, {"to": "b"}], run_in=5), list[Dispatched | None])
assert_type(bare.unlock({"to": "a"}), bool)
full.delay({"to": "a"}, run_at=1.5)
full.delay({"to": "a"}, run_in=timedelta(1))
nothing.delay(run_in=5)
nothing.unlock()
optional.delay()
optional.delay(7)
anything.delay()
anything.delay([1, 2])
Methods.static.delay([1])
assert_type(bare.delay({"to": "a"}).run_at, float | None)

bare.delay()  # wrong
bare.delay(3)  # wrong
bare.delay({"too": "a"})  # wrong
bare.delay({"to": "a"}, run_at="tomorrow")  # wrong
bare.delay({"to": "a"}, run_at=timedelta(1))  # wrong
bare.delay({"to": "a"}, run_in="5")  # wrong
bare.delay({"to": "a"}, run_in=datetime.now(UTC))  # wrong
bare.delay({"to": "a"}, when=5)  # wrong
bare.delay({"to": "a"}, 5)  # wrong
bare.delay_many([3])  # wrong
bare.delay_many({"to": "a"})  # wrong
bare.unlock(3)  # wrong
nothing.delay(3)  # wrong
optional.delay("seven")  # wrong
Methods.static.delay(["1"])  # wrong
bare.delay({"to": "a"}).entry_id + ""  # wrong
bare.delay({"to": "a"}).id = "x"  # wrong

# --- inside a task ---


@task
def inside(payload: Mail) -> None:
    here = current_task()
    assert_type(here, TaskContext)
    assert_type((here.attempt, here.lost, here.stopping), tuple[int, bool, bool])
    assert_type(here.message, TaskMessage)
    here.attempt + "1"  # wrong
    here.retry()  # wrong
    if payload["to"]:
        raise Retry(delay=timedelta(1))
    raise Reject("no")


Retry("5")  # wrong
Reject()  # wrong
Reject(5)  # wrong

# --- configuration ---


def handle(message: TaskMessage, error: TaskRunnerError) -> None: ...


def handle_loosely(message: object, error: Exception) -> str:
    return ""


def handle_error_first(error: TaskRunnerError, message: TaskMessage) -> None: ...


def handle_one(message: TaskMessage) -> None: ...


def handle_report(report: ErrorReport) -> None: ...


def look(stats: Stats) -> None: ...


def before(context: TaskContext) -> None: ...


def after(context: TaskContext, error: BaseException | None) -> None: ...


def after_an_error(context: TaskContext, error: BaseException) -> None: ...


async def handle_later(message: TaskMessage, error: TaskRunnerError) -> None: ...


config = TaskRunnerConfig(
    consumer_group="g",
    num_workers=4,
    block_duration=timedelta(seconds=2),
    shutdown_timeout=5,
    min_workers=1,
    max_workers=4,
    desired_wait_time=1,
    desired_wait_time_tolerance=0.5,
    failed_task_handler=handle,
    long_queue_hook=look,
    on_error=handle_report,
    before_task=before,
    after_task=after,
    timings=Timings(lease=timedelta(seconds=2), poll=1),
)
assert_type(config.block_duration, float)
TaskRunnerConfig(consumer_group="g", failed_task_handler=handle_loosely)
TaskRunnerConfig(consumer_group="g", failed_task_handler=lambda message, error: print(message.id))

TaskRunnerConfig()  # wrong
TaskRunnerConfig("g")  # wrong
TaskRunnerConfig(consumer_group=5)  # wrong
TaskRunnerConfig(consumer_group="g", num_workers="8")  # wrong
TaskRunnerConfig(consumer_group="g", workers=8)  # wrong
TaskRunnerConfig(consumer_group="g", block_duration="5s")  # wrong
TaskRunnerConfig(consumer_group="g", timings={"lease": 5})  # wrong
TaskRunnerConfig(consumer_group="g", failed_task_handler=handle_one)  # wrong
TaskRunnerConfig(consumer_group="g", failed_task_handler=handle_error_first)  # wrong
TaskRunnerConfig(consumer_group="g", failed_task_handler=handle_report)  # wrong
TaskRunnerConfig(consumer_group="g", long_queue_hook=before)  # wrong
TaskRunnerConfig(consumer_group="g", on_error=look)  # wrong
TaskRunnerConfig(consumer_group="g", before_task=after)  # wrong
TaskRunnerConfig(consumer_group="g", after_task=after_an_error)  # wrong
TaskRunnerConfig(consumer_group="g", after_task=handle)  # wrong
Timings(lease="2")  # wrong
Timings(2)  # wrong
config.num_workers = 5  # wrong

# --- a runner ---

queue = RedisStreamQueue(redis.Redis(), prefix="p", reclaim_delay=timedelta(minutes=1))
runner = TaskRunner(config, queue=queue)
TaskRunner(consumer_group="g", client="redis://localhost", num_workers=2, on_error=handle_report)
TaskRunner(consumer_group="g", block_duration=timedelta(seconds=2), timings=Timings())
settings: dict[str, Any] = {"num_workers": 3}
TaskRunner(consumer_group="g", **settings)

assert_type(runner.dispatch("full", {"to": "a"}, run_in=5), Dispatched)
assert_type(runner.stats(), Stats)
assert_type(runner.stop(timeout=timedelta(1)), bool)
assert_type(runner.dead_letters.list(), list[DeadLetter])
assert_type(runner.delayed.get("x"), DelayedTask | None)
assert_type(runner.state, Literal["init", "starting", "started", "stopping", "stopped"])
with runner as entered:
    assert_type(entered, TaskRunner)
runner.register(bare)

TaskRunner("g")  # wrong
TaskRunner(client=5, consumer_group="g")  # wrong
TaskRunner(queue="q", consumer_group="g")  # wrong
TaskRunner(consumer_grup="g")  # wrong
TaskRunner(consumer_group=5)  # wrong
TaskRunner(consumer_group="g", num_workers="8")  # wrong
TaskRunner(consumer_group="g", failed_task_handler=handle_one)  # wrong
TaskRunner(consumer_group="g", on_error=look)  # wrong
RedisStreamQueue("redis://localhost", reclaim_delay="5")  # wrong
RedisStreamQueue("redis://localhost", "prefix")  # wrong
RedisStreamQueue(5)  # wrong
runner.dispatch(full, {"to": "a"})  # wrong
runner.dispatch("full", {"to": "a"}, run_at="now")  # wrong
runner.stop(timeout="5")  # wrong
runner.register(wait)  # wrong
runner.state = "started"  # wrong
runner.dead_letters.requeue(5)  # wrong

# --- tests ---

with eager(runner, clock=MovableClock(), hold=True) as tasks:
    assert_type(tasks, Eager)
    assert_type(tasks.runs, list[Run])
    assert_type(tasks.drain(everything=True), Drained)
    tasks.clock.move(timedelta(1))
with eager(max_payload_bytes=5, registry=Registry()):
    pass
assert_type(drain(runner, timeout=5).waiting, int)

eager(5)  # wrong
eager(max_payload_bytes="5")  # wrong
eager(payload=5)  # wrong
tasks.clock.move("5")  # wrong
drain()  # wrong
drain(runner, clock=5)  # wrong
