"""BL-09: whatever a task raises is one failed attempt: slot, thread and message survive it."""

import time
from collections.abc import Callable
from pathlib import Path

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import (
    Desk,
    Ledger,
    WorkerProcess,
    assert_recovered,
    busy,
    eventually,
    service_threads,
)

TASKS = """
    def fails(function):
        @task(name=function.__name__.replace("_", "-"), max_retry=2, retry_delay=0.05)
        def body(payload):
            with record(function.__name__):
                return function()
        return body

    @task(name="note")
    def note(payload):
        with record(payload):
            pass

    @fails
    def system_exit():
        raise SystemExit(3)

    @fails
    def keyboard_interrupt():
        raise KeyboardInterrupt

    @fails
    def generator_exit():
        raise GeneratorExit

    @fails
    def memory_error():
        raise MemoryError

    @fails
    def real_memory_error():
        bytearray(2**62)

    @fails
    def recursion_error():
        def deeper():
            deeper()
        deeper()

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")
        __repr__ = __str__

    @fails
    def mute():
        raise Mute("payload")

    class Killer(Exception):
        def __str__(self):
            raise SystemExit(4)
        __repr__ = __str__

    @fails
    def killer():
        raise Killer

    class NotText(Exception):
        def __str__(self):
            return 7

    @fails
    def not_text():
        raise NotText

    @fails
    def holding_a_lock():
        raise ValueError(threading.Lock(), open(os.devnull))

    @fails
    def group():
        raise BaseExceptionGroup("several", [ValueError("one"), SystemExit(1), Mute()])

    @fails
    def surrogate():
        raise ValueError("half a character: \\ud800, and a zero: \\0")

    @fails
    def huge():
        raise ValueError("x" * 5_000_000)

    @fails
    def circular():
        error = ValueError("circle")
        other = KeyError("circle")
        error.__cause__, other.__cause__ = other, error
        raise error

    class Notes(Exception):
        @property
        def __notes__(self):
            raise KeyboardInterrupt

    @fails
    def notes():
        raise Notes

    class Class(Exception):
        @property
        def __class__(self):
            raise RuntimeError("no class")

    @fails
    def no_class():
        raise Class

    class NeedsTwo(Exception):
        def __init__(self, one, two):
            super().__init__("called with one argument, this class can't be made")

    @fails
    def cannot_be_made_again():
        raise NeedsTwo(1, 2)

    from taskrunner import TaskRunnerError

    class OfOurs(TaskRunnerError):
        def __init__(self, one, two):
            super().__init__("called with one argument, this class can't be made")

    @fails
    def of_ours_and_cannot_be_made_again():
        raise OfOurs(1, 2)

    @fails
    def stop_iteration():
        raise StopIteration

    class MuteResult:
        def __repr__(self):
            raise RuntimeError("no text")
        __str__ = __repr__

    @task(name="mute-result")
    def mute_result(payload):
        with record("mute_result"):
            return MuteResult()
"""

RAISING = [
    *("system_exit", "keyboard_interrupt", "generator_exit", "memory_error", "real_memory_error"),
    *("recursion_error", "mute", "killer", "not_text", "holding_a_lock", "group", "surrogate"),
    *("huge", "circular", "notes", "no_class", "cannot_be_made_again"),
    *("of_ours_and_cannot_be_made_again", "stop_iteration"),
]


def test_bl09_anything_raised_is_one_failed_attempt(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """Each task is tried max_retry times and ends in the dead letters, named; the two workers live
    and are as fast as before."""
    worker = make_worker(tasks_file=tasks_file(TASKS), config={"num_workers": 2})
    desk = make_desk(server.url)
    threads = service_threads(worker)
    for name in RAISING:
        desk.send(name.replace("_", "-"), [None])
    desk.send("mute-result", [None])
    eventually(desk.is_empty, 20, message=lambda: f"{ledger.counts()}\n{worker.log()[-3000:]}")
    assert ledger.counts() == {**dict.fromkeys(RAISING, 2), "mute_result": 1}
    letters = desk.letters()
    assert sorted(letter.task_name.replace("-", "_") for letter in letters) == sorted(RAISING)
    assert {letter.attempts for letter in letters} == {2}
    assert all(letter.error_type and len(letter.error) <= 1000 for letter in letters)
    started = time.monotonic()
    desk.send("note", list(range(50)))
    ledger.wait_finished(range(50))
    assert time.monotonic() - started < 1 + busy()
    assert_recovered(worker, desk, ledger, threads)


def test_bl09_handler_and_hooks_that_raise_anything_cost_only_themselves(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    ledger: Ledger,
) -> None:
    """The failed-task handler, retry_delay, on_error and unique_key are the application's too."""
    worker = make_worker(
        tasks_file=tasks_file(
            """
            from taskrunner import TaskRunnerError

            class Odd(TaskRunnerError):
                def __init__(self, one, two):
                    super().__init__("called with one argument, this class can't be made")
                def __str__(self):
                    raise SystemExit(5)

            def odd(*args):
                raise Odd(1, 2)

            calls = []

            def handler(message, error):
                with record(f"handler-{message.payload}"):
                    calls.append(message.id)
                    if calls.count(message.id) == 1:
                        odd()

            SETTINGS = {"failed_task_handler": handler, "on_error": odd}

            @task(name="note")
            def note(payload):
                with record(payload):
                    pass

            @task(name="bad", max_retry=2, retry_delay=odd)
            def bad(payload):
                with record(payload):
                    odd()
            """
        ),
        queue={"reclaim_delay": 1},
    )
    desk = make_desk(server.url, reclaim_delay=1)
    threads = service_threads(worker)
    desk.send("bad", ["bad"])
    ledger.wait_finished(["handler-bad"], 15)
    eventually(desk.is_empty, 10, message=worker.log)
    assert ledger.counts() == {"bad": 2, "handler-bad": 2}
    assert_recovered(worker, desk, ledger, threads)
