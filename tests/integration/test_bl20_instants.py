"""BL-20: an instant is an instant, whatever zone the producer, the worker or the value is in."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Ledger, Names, WorkerProcess, busy, eventually
from tests.support.fleet import Fleet

ROOT = Path(__file__).resolve().parents[2]
ZONES = [
    "UTC",
    "Europe/London",
    "Australia/Sydney",
    "America/Santiago",
    "Asia/Kathmandu",
    "Pacific/Chatham",
]

PRODUCER = """
    import json, sys, time
    from datetime import UTC, datetime, timedelta, timezone
    from zoneinfo import ZoneInfo
    from taskrunner import Registry, RedisStreamQueue, TaskRunner, task

    url, prefix, group = sys.argv[1:4]
    registry = Registry()

    @task(name="note", registry=registry)
    def note(payload): ...

    runner = TaskRunner(consumer_group=group, registry=registry, queue=RedisStreamQueue(url, prefix=prefix))
    london = ZoneInfo("Europe/London")
    repeated = datetime(2031, 10, 26, 1, 30, 0, 250_000)
    far = datetime(2031, 7, 1, 12, 0, 0, 250_000, tzinfo=UTC)
    values = {
        "utc": far,
        "kathmandu": far.astimezone(ZoneInfo("Asia/Kathmandu")),
        "sydney": far.astimezone(ZoneInfo("Australia/Sydney")),
        "local": far.astimezone(),
        "fixed": far.astimezone(timezone(timedelta(hours=-9, minutes=-30))),
        "winter": datetime(2031, 1, 15, 9, 0, tzinfo=london),
        "summer": datetime(2031, 7, 15, 9, 0, tzinfo=london),
        "first": repeated.replace(tzinfo=london, fold=0),
        "second": repeated.replace(tzinfo=london, fold=1),
        "gap": datetime(2031, 3, 30, 1, 30, tzinfo=london),
        "over the change": (datetime(2031, 3, 29, 12, 0, tzinfo=UTC) + timedelta(days=1)).astimezone(london),
        "number": far.timestamp(),
    }
    scores = {name: note.delay(name, run_at=value).run_at for name, value in values.items()}
    for naive in (datetime(2031, 7, 1, 12), datetime.now(), repeated.replace(fold=1)):
        try:
            note.delay("naive", run_at=naive)
            scores["naive"] = "accepted"
        except ValueError as error:
            assert "time zone" in str(error), error
    soon = datetime.now(UTC) + timedelta(seconds=0.25)
    print(json.dumps({
        "scores": scores,
        "soon": [soon.timestamp(), note.delay("soon", run_at=soon).run_at],
        "same": note.delay("same", run_at=soon.astimezone(ZoneInfo("Pacific/Apia"))).run_at,
        "past": note.delay("past", run_at=soon.astimezone() - timedelta(hours=1)).entry_id,
    }))
"""


def produce(url: str, names: Names, zone: str) -> dict[str, Any]:
    """What a producer in a process with this TZ scheduled."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRODUCER), url, names.prefix, names.group],
        env={**os.environ, "TZ": zone, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    result: dict[str, Any] = json.loads(found.stdout)
    return result


@pytest.fixture
def fleet(server: EmbeddedServer, names: Names) -> Iterator[Fleet]:
    with Fleet(server.url, names) as made:
        yield made


def test_bl20_every_zone_of_the_producer_means_the_same_instants(fleet: Fleet) -> None:
    """Aware values by their own offset, `fold` included; naive ones are refused everywhere."""
    results = {zone: produce(fleet.url, fleet.names, zone) for zone in ZONES}
    scores = results["UTC"]["scores"]
    assert "naive" not in scores
    assert all(result["scores"] == scores for result in results.values())
    far = datetime(2031, 7, 1, 12, 0, 0, 250_000, tzinfo=UTC).timestamp()
    for name in ("utc", "kathmandu", "sydney", "local", "fixed", "number"):
        assert scores[name] == far, name
    london = ZoneInfo("Europe/London")
    for name, expected in {
        "winter": datetime(2031, 1, 15, 9, 0, tzinfo=UTC),
        "summer": datetime(2031, 7, 15, 8, 0, tzinfo=UTC),
        "first": datetime(2031, 10, 26, 0, 30, 0, 250_000, tzinfo=UTC),
        "second": datetime(2031, 10, 26, 1, 30, 0, 250_000, tzinfo=UTC),
        "over the change": datetime(2031, 3, 30, 12, 0, tzinfo=UTC),
    }.items():
        assert scores[name] == expected.timestamp(), name
    # a wall time that never was: as the zone itself resolves it
    assert scores["gap"] == datetime(2031, 3, 30, 1, 30, tzinfo=london).timestamp()
    for result in results.values():
        asked, got = result["soon"]
        assert got == pytest.approx(asked, abs=1e-5)
        assert result["same"] == got
        assert result["past"] is not None
    stored = [score for text, score in fleet.members() if b'"soon"' not in text]
    assert {score for score in stored if score > far - 1} >= {far}


@pytest.mark.slow
def test_bl20_tasks_start_on_time_whatever_zone_the_worker_is_in(
    server: EmbeddedServer,
    names: Names,
    ledger: Ledger,
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """Never early, and late by no zone's offset."""
    offset = time.time() - time.monotonic()
    with Fleet(server.url, names) as fleet:
        for zone in ("America/Santiago", "Asia/Kathmandu"):
            worker = make_worker(url=server.url, env={"TZ": zone})
            due = {}
            for delay in (0.25, 2.0):
                name = f"{zone} {delay}"
                instant = datetime.now(ZoneInfo("Australia/Sydney")) + timedelta(seconds=delay)
                fleet.note.delay(name, run_at=instant)
                due[name] = instant.timestamp()
            for name, instant_due in due.items():
                run = eventually(lambda name=name: ledger.runs(name), 15)[0]
                assert 0 <= run.start + offset - instant_due + 0.005 < busy(2), name
            assert worker.stop() == 0
