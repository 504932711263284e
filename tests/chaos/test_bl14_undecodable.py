"""BL-14: a message that can't be decoded is set aside; it stops nobody and is shown to nobody."""

import json
from collections.abc import Callable
from pathlib import Path

from taskrunner.cli.embedded import EmbeddedServer
from tests.support import (
    Desk,
    Ledger,
    Names,
    WorkerProcess,
    assert_recovered,
    eventually,
    service_threads,
)

GOOD = {
    "unique": False,
    "unique_for": 0,
    "unique_key": "",
    "unique_lock_value": "",
    "reservation_timeout": 10**9,
    "task_name": "note",
    "payload": "SECRET",
}


def body(**changes: object) -> bytes:
    fields = {key: value for key, value in (GOOD | changes).items() if value != "absent"}
    return json.dumps(fields).encode()


UNDECODABLE: dict[str, dict[bytes, bytes]] = {
    "no expected field": {b"body": body()},
    "an unknown field only": {b"\xff\xfe": b"\x00\x01" * 100},
    "an empty body": {b"payload": b""},
    "cut JSON": {b"payload": body()[:-20]},
    "JSON null": {b"payload": b"null"},
    "a list": {b"payload": b'["note", "SECRET"]'},
    "a text": {b"payload": b'"SECRET"'},
    "a number": {b"payload": b"1e999"},
    "a number as name": {b"payload": body(task_name=7)},
    "no name": {b"payload": body(task_name="absent")},
    "an empty name": {b"payload": body(task_name="")},
    "a list as name": {b"payload": body(task_name=["note"])},
    "unique of a wrong type": {b"payload": body(unique="yes")},
    "reservation_timeout of a wrong type": {b"payload": body(reservation_timeout="1s")},
    "a negative retry counter": {b"payload": body(attempt=-1)},
    "a huge retry counter": {b"payload": body(attempt=10**30)},
    "a text as retry counter": {b"payload": body(attempt="one")},
    "a negative move counter": {b"payload": body(unknown=-3)},
    "100,000 brackets": {b"payload": b'{"task_name":"note","payload":' + b"[" * 100_000},
    "100,000 nested lists": {
        b"payload": b'{"task_name":"note","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    },
    "NaN": {b"payload": b'{"task_name":"note","payload":NaN}'},
    "rubbish behind it": {b"payload": body() + b"}"},
    "two megabytes of rubbish": {b"payload": b"SECRET" * 350_000},
}


def test_bl14_undecodable_messages_go_to_the_dead_letters_and_stop_nobody(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
) -> None:
    """Each kind, each followed by a valid task: all valid ones run once in the same process, the
    stream is empty, every bad one is a dead letter; the log shows no content."""
    worker = make_worker(config={"batch_size": 7, "num_workers": 2}, log_level="DEBUG")
    desk = make_desk(server.url)
    threads = service_threads(worker)
    for number, fields in enumerate(UNDECODABLE.values()):
        desk.client.xadd(names.stream, fields)
        desk.send("note", [number])
    valid = list(range(len(UNDECODABLE)))
    ledger.wait_finished(valid, 15)
    eventually(desk.is_empty, 10, message=lambda: worker.log()[-3000:])
    ledger.assert_once(valid)
    letters = desk.letters()
    assert len(letters) == len(UNDECODABLE), [letter.error for letter in letters]
    assert {letter.error_type for letter in letters} == {"InvalidTaskPayloadError"}
    assert all(len(letter.error) < 1100 for letter in letters)
    assert "SECRET" not in worker.log()
    assert max(map(len, worker.log().splitlines())) < 1500
    assert_recovered(worker, desk, ledger, threads)


def test_bl14_lenient_messages_run(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    names: Names,
    ledger: Ledger,
) -> None:
    """What other versions and other languages may write is no rubbish: unknown keys, invalid UTF-8
    inside a text, a field more, keys in another case, no payload at all."""
    make_worker()
    desk = make_desk(server.url)
    entries = {
        "unknown version": {b"payload": body(payload="unknown version", version=99)},
        "a field more": {b"other": b"\xff", b"payload": body(payload="a field more")},
        "bad \ufffd bytes": {b"payload": body(payload="bad @ bytes").replace(b"@", b"\xff")},
        "another case": {b"payload": b'{"Task_Name":"note","PAYLOAD":"another case"}'},
        None: {b"payload": body(payload="absent")},
    }
    for fields in entries.values():
        desk.client.xadd(names.stream, fields)
    ledger.wait_finished(entries)
    eventually(desk.is_empty)
    ledger.assert_once(entries)


def test_bl14_undecodable_message_is_given_to_the_handler(
    server: EmbeddedServer,
    make_worker: Callable[..., WorkerProcess],
    make_desk: Callable[..., Desk],
    tasks_file: Callable[[str], Path],
    names: Names,
    ledger: Ledger,
) -> None:
    """A failed-task handler gets it, once, with the raw text; nothing is kept in the dead letters."""
    make_worker(
        tasks_file=tasks_file(
            """
            def handler(message, error):
                with record([type(error).__name__, message.task_name, message.raw[:9]]):
                    pass

            SETTINGS = {"failed_task_handler": handler}
            """
        )
    )
    desk = make_desk(server.url)
    desk.client.xadd(names.stream, {"payload": b"rubbish \xff and more"})
    eventually(lambda: ledger.runs() and desk.is_empty())
    assert [run.id for run in ledger.runs()] == [["InvalidTaskPayloadError", "", "rubbish \ufffd"]]
    assert desk.letters() == []
