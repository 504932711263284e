"""Telling what went wrong: once, to everybody who wants to know, and without ever getting in the
way."""

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from taskrunner.errors import (
    DeliveryLostError,
    InvalidTaskPayloadError,
    MaxRetryExceededError,
    Reject,
    Retry,
    TaskExecutionError,
    TaskNotFoundError,
    TaskRunnerError,
    TaskTimeoutError,
)
from taskrunner.reports import ErrorReport, Health, Reports


class Unspeakable(Exception):
    """Neither `str` nor `repr` work."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class OwnRetry(Retry):
    """A subclass, by an application, with a constructor of its own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(3)
        self.first, self.second = first, second


class OwnRoot(TaskRunnerError):
    """The same from the root, with a keyword that must be given."""

    def __init__(self, *, text: str) -> None:
        super().__init__(text)


class Spiteful(TaskRunnerError):
    """Its constructor works once."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        if self.made > 1:
            raise SystemExit(9)
        super().__init__()


def raised(error: BaseException) -> BaseException:
    """The same error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


# --- reports ---


def test_a_report_is_kept_with_all_that_is_known() -> None:
    """`runner.errors` answers what went wrong, with which message, and when."""
    reports = Reports()

    reports.add("task_failed", ValueError("bad"), task_name="t", message_id="m")

    (report,) = reports.recent
    assert isinstance(report, ErrorReport)
    assert (report.action, report.task_name, report.message_id) == ("task_failed", "t", "m")
    assert "ValueError: bad" in str(report.error)
    assert report.at > 1.7e9


def test_the_newest_reports_are_kept_and_their_number_is_bounded() -> None:
    """A fault that repeats for a week must not fill the memory (D8)."""
    reports = Reports()
    most = reports.recent.maxlen
    assert most is not None

    for number in range(most + 10):
        reports.add("service_error", ValueError(number))

    assert len(reports.recent) == most
    assert f"ValueError: {most + 9}" in str(reports.recent[-1].error)
    assert "ValueError: 10" in str(reports.recent[0].error)


def test_nothing_is_queued_without_a_hook() -> None:
    """A queue that nobody reads would only grow."""
    assert Reports().for_hook is None


def test_the_hook_gets_the_error_itself() -> None:
    """With its traceback and cause: it may go to an error tracker."""
    reports = Reports(hook=True)
    error = raised(TaskExecutionError("t", ValueError("bad")))

    reports.add("task_failed", error)

    assert reports.for_hook is not None
    report = reports.for_hook.get_nowait()
    assert report is not None
    assert report.error is error
    assert report.error.__traceback__ is not None


def test_a_hook_that_is_too_slow_loses_reports_and_they_are_counted() -> None:
    """Reporting never waits for the application (D8)."""
    reports = Reports(hook=True)

    for number in range(1500):
        reports.add("service_error", ValueError(number))

    assert reports.for_hook is not None
    assert reports.for_hook.qsize() == 1000
    assert reports.dropped == 500


@pytest.mark.parametrize(
    "error",
    [
        Unspeakable(),
        TaskExecutionError("t", Unspeakable()),
        TaskExecutionError("t", SystemExit(3)),
        BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()]),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ValueError("half a character: \ud83d"),
        TaskTimeoutError(),
        Retry(),
        Retry(5),
        Reject("why"),
        OwnRetry("a", "b"),
        OwnRoot(text="x"),
        Spiteful(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_reporting_never_raises(error: BaseException) -> None:
    """Whoever reports is in the middle of something: a hook's odd error must not fail a task that
    had succeeded."""
    reports = Reports(hook=True)

    reports.add("service_error", raised(error))

    assert len(reports.recent) == 1
    assert isinstance(reports.recent[-1].error, BaseException)


@pytest.mark.parametrize(
    "error",
    [
        TaskExecutionError("t", ValueError("bad")),
        TaskTimeoutError("slow"),
        MaxRetryExceededError("lost"),
        TaskNotFoundError("who"),
        InvalidTaskPayloadError("what"),
        DeliveryLostError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_our_own_errors_keep_their_kind_and_text(error: TaskRunnerError) -> None:
    """`isinstance` works on what is in `runner.errors`."""
    reports = Reports()

    reports.add("task_failed", raised(error))

    kept = reports.recent[-1].error
    assert type(kept) is type(error)
    assert str(error) in (str(kept), str(kept).replace("TaskRunnerError: ", ""))
    assert kept.__traceback__ is None


def test_what_is_kept_holds_no_payload_alive() -> None:
    """A thousand kept errors must not keep a thousand payloads of 5 MB (BL-17)."""

    class Payload:
        pass

    def fail(payload: Any) -> None:
        raise ValueError("bad", payload)

    reports = Reports()
    payload = Payload()
    alive = weakref.ref(payload)
    try:
        fail(payload)
    except ValueError as error:
        reports.add("task_retry", TaskExecutionError("t", error))
        reports.add("service_error", error)
    del payload
    gc.collect()

    assert alive() is None
    assert len(reports.recent) == 2


def test_a_report_is_frozen() -> None:
    """Several readers see one report."""
    report = ErrorReport(action="a", error=ValueError())

    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        report.action = "b"  # type: ignore[misc]


# --- health ---


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def health(reports: Reports) -> Health:
    return Health(reports, lambda error: isinstance(error, ConnectionError))


def actions(reports: Reports) -> list[str]:
    return [report.action for report in reports.recent]


def test_an_outage_is_told_once_however_many_services_meet_it(
    reports: Reports, health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten loops and a minute without Redis are one line, not thousands (D33)."""
    with caplog.at_level(logging.INFO, "taskrunner"):
        for _ in range(50):
            for name in ("fetcher-1", "elector", "settler"):
                health.failed(name, ConnectionError("refused"))

    assert actions(reports) == ["service_error"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "refused" in record.getMessage()
    assert record.__dict__["action"] == "service_error"


def test_recovery_is_told_once_when_everyone_is_well(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    """It is over when the last one says so."""
    health.failed("fetcher-1", ConnectionError())
    health.failed("elector", ConnectionError())

    with caplog.at_level(logging.INFO, "taskrunner"):
        caplog.clear()
        health.succeeded("fetcher-1")
        assert caplog.records == []
        health.succeeded("elector")
        health.succeeded("elector")
        health.succeeded("settler")

    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.__dict__["action"] == "service_recovered"


def test_the_next_outage_is_told_again(reports: Reports, health: Health) -> None:
    """Once per outage, not once per life."""
    for _ in range(3):
        health.failed("elector", ConnectionError())
        health.succeeded("elector")

    assert actions(reports) == ["service_error"] * 3


def test_an_error_of_another_kind_is_told_for_each_service_and_kind(
    reports: Reports, health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault in the code of one loop is not drowned by that of another."""
    with caplog.at_level(logging.INFO, "taskrunner"):
        for _ in range(5):
            health.failed("janitor", ValueError("a"))
            health.failed("janitor", KeyError("b"))
            health.failed("tuner", ValueError("c"))

    assert len(reports.recent) == 3
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR] * 3


def test_success_while_all_is_well_says_nothing(
    reports: Reports, health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    """It is called in every round of every loop."""
    with caplog.at_level(logging.DEBUG, "taskrunner"):
        for _ in range(100):
            health.succeeded("fetcher-1")

    assert caplog.records == []
    assert len(reports.recent) == 0


def test_services_may_fail_and_recover_at_once(health: Health) -> None:
    """Every loop calls it from a thread of its own."""
    faults: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            for _ in range(3000):
                work()
        except BaseException as error:
            faults.append(error)

    def loop(name: str) -> Callable[[], None]:
        def work() -> None:
            health.failed(name, ConnectionError())
            health.succeeded(name)

        return work

    threads = [
        threading.Thread(target=guarded, args=(loop(f"service-{number}"),)) for number in range(5)
    ]
    logging.getLogger("taskrunner.service").setLevel(logging.CRITICAL)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        logging.getLogger("taskrunner.service").setLevel(logging.NOTSET)

    assert faults == []


def test_library_prints_nothing_when_no_logging_is_set_up() -> None:
    """A library leaves it to the application whether and where there is a log."""
    program = (
        "import logging, taskrunner\n"
        "logging.getLogger('taskrunner.settler').error('not for the terminal')\n"
        "assert not logging.getLogger().handlers and logging.getLogger('taskrunner').level == 0\n"
        "assert logging.getLogger('taskrunner').propagate\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (made.stdout, made.stderr) == ("", "")
