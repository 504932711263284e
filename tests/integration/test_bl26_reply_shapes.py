"""BL-26: the application's client may answer in any shape; ours is not affected by it."""

import importlib
import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from taskrunner import Retry, TaskAlreadyDispatchedError, current_task
from taskrunner.cli.embedded import EmbeddedServer
from tests.support import Desk, Names, eventually
from tests.support.fleet import Fleet

PARSERS = importlib.import_module("redis._parsers")

PAYLOAD = {"text": "héllo \u4e16\u754c \U0001f600 \x00\x7f", "bytes": "\u00ff\u00fe", "n": 2**80}


def cycle(fleet: Fleet, client: "redis.Redis") -> list[Any]:
    """Every kind of reply once: direct, delayed, unique, retried, reclaimed, buried, looked at."""
    names = fleet.names
    done: list[Any] = []
    lock = threading.Lock()

    def note(payload: Any) -> None:
        with lock:
            done.append([current_task().name, current_task().attempt, payload])

    def retry(payload: Any) -> None:
        note(payload)
        if current_task().attempt == 1:
            raise Retry(0.1)

    def fail(payload: Any) -> None:
        note(payload)
        raise ValueError(PAYLOAD["text"])

    direct = fleet.task(note, name="direct")
    unique = fleet.task(
        note, name="unique", unique_for=60, unique_key=lambda _: f"clé {names.prefix}"
    )
    retried = fleet.task(retry, name="retried", max_retry=2)
    failing = fleet.task(fail, name="failing")
    leader = fleet.make(url=client, timings={"consumer_idle": 0.5, "janitor": 0.3})
    leader.make_default()
    leader.start()
    eventually(lambda: leader.is_leader)
    assert leader.replications() == 1
    assert unique.delay(PAYLOAD, run_in=0.5).entry_id is None
    with pytest.raises(TaskAlreadyDispatchedError):
        unique.delay(PAYLOAD)
    assert [one.payload for one in leader.delayed.list()] == [PAYLOAD]
    sent = direct.delay(PAYLOAD)
    assert sent.entry_id is not None and "-" in sent.entry_id
    assert len(direct.delay_many([PAYLOAD] * 3)) == 3
    retried.delay(PAYLOAD)
    failing.delay(PAYLOAD)
    eventually(lambda: len(done) == 8)
    desk = Desk(fleet.url, names)
    desk.strand("direct", [PAYLOAD], idle=5)
    desk.client.xgroup_createconsumer(names.stream, names.group, f"{names.group}_dead_1")
    eventually(lambda: len(done) == 9)
    eventually(desk.is_empty)
    (letter,) = leader.dead_letters.list()
    assert letter.payload == PAYLOAD
    # A line of its own in a log: what would end or steer it is shown escaped.
    assert str(PAYLOAD["text"]).replace("\x00\x7f", "\\x00\\x7f") in letter.error
    leader.dead_letters.requeue(letter.id)
    eventually(lambda: len(done) == 10)
    eventually(lambda: len(leader.dead_letters) == 1)
    metrics = leader.queue.get_metrics()
    eventually(lambda: leader.stats().per_task_timing.keys() >= {"direct", "failing"})
    consumers = {one.name for one in metrics.groups[0].consumers}
    assert consumers >= {f"{names.group}_{leader.host}_{number}" for number in (1, 2)}

    def dead() -> list[Any]:
        rows: Any = desk.client.xinfo_consumers(names.stream, names.group)
        return [row for row in rows if row["name"].endswith(b"_dead_1")]

    eventually(lambda: not dead(), 10)
    assert leader.stop()
    desk.close()
    return sorted(done, key=repr)


def test_bl26_full_cycle_is_the_same_with_any_client(server: EmbeddedServer) -> None:
    """decode_responses on and off, RESP2 and RESP3, with hiredis and the Python parsers: one and
    the same ledger, with payloads that are not ASCII."""
    parsers = {2: [PARSERS._HiredisParser, PARSERS._RESP2Parser]}
    parsers[3] = [PARSERS._HiredisParser, PARSERS._RESP3Parser]
    results: list[Any] = []
    errors: list[BaseException] = []

    def run(options: dict[str, Any]) -> None:
        client = redis.Redis.from_url(server.tcp_url, **options)
        try:
            with Fleet(server.url, Names()) as fleet:
                results.append(cycle(fleet, client))
        except Exception as error:
            errors.append(error)
        finally:
            client.close()

    threads = [
        threading.Thread(
            target=run,
            args=({"decode_responses": decode, "protocol": protocol, "parser_class": parser},),
        )
        for decode, protocol in itertools.product((True, False), (2, 3))
        for parser in parsers[protocol]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(results) == 8
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 10


def test_bl26_other_client_settings_do_no_harm(server: EmbeddedServer) -> None:
    """An encoding that can't write it, retries of its own, health checks, a client name, a blocking
    pool of one connection."""
    settings: list[Callable[[], redis.Redis]] = [
        lambda: redis.Redis.from_url(server.tcp_url, encoding="latin-1", decode_responses=True),
        lambda: redis.Redis.from_url(server.tcp_url, encoding="ascii", encoding_errors="ignore"),
        lambda: redis.Redis.from_url(server.tcp_url, health_check_interval=1, client_name="mine"),
        lambda: redis.Redis.from_url(server.tcp_url, single_connection_client=True),
        lambda: redis.Redis(
            connection_pool=redis.BlockingConnectionPool.from_url(
                server.tcp_url, max_connections=1, timeout=1
            )
        ),
        lambda: redis.Redis.from_url(server.url, decode_responses=True),  # a Unix socket
    ]
    with ExitStack() as stack:
        for make in settings:
            fleet = stack.enter_context(Fleet(server.url, Names()))
            runner = fleet.start(url=make())
            runner.make_default()
            fleet.note.delay(PAYLOAD)
            fleet.note.delay(PAYLOAD, run_in=0.2)
            eventually(lambda fleet=fleet: fleet.payloads() == [PAYLOAD, PAYLOAD], 10)
