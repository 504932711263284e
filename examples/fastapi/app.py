"""Reports: a text comes in over HTTP, a worker counts its words."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from taskrunner import TaskRunner, task

DATABASE = Path(__file__).with_name("reports.sqlite3")

runner = TaskRunner(consumer_group="reports")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    runner.stop()  # was not started here: closes the connections that `.delay()` has opened


app = FastAPI(lifespan=lifespan)


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    """A connection of one's own; commits."""
    connection = sqlite3.connect(DATABASE, timeout=20)
    try:
        connection.execute("CREATE TABLE IF NOT EXISTS report (text TEXT, words INTEGER)")
        with connection:
            yield connection
    finally:
        connection.close()


def store(text: str) -> int | None:
    with database() as connection:
        return connection.execute("INSERT INTO report VALUES (?, NULL)", [text]).lastrowid


# --- the task ---


@task(name="count-words", max_retry=5)
def count_words(payload):
    number = payload["report"]
    with database() as connection:
        (text,) = connection.execute("SELECT text FROM report WHERE rowid = ?", [number]).fetchone()
        connection.execute(
            "UPDATE report SET words = ? WHERE rowid = ?", [len(text.split()), number]
        )


# --- the endpoints ---


class Report(BaseModel):
    text: str


@app.post("/reports", status_code=202)
def create(report: Report):
    """A plain `def`: FastAPI runs it in a thread, where `.delay()` may wait for Redis."""
    number = store(report.text)
    count_words.delay({"report": number})
    return {"id": number}


@app.post("/async/reports", status_code=202)
async def create_async(report: Report):
    """In an `async def`, whatever waits goes to a thread: here it would hold up every request."""
    number = await run_in_threadpool(store, report.text)
    await run_in_threadpool(count_words.delay, {"report": number})
    return {"id": number}


@app.get("/reports/{number}")
def show(number: int):
    with database() as connection:
        found = connection.execute("SELECT words FROM report WHERE rowid = ?", [number]).fetchone()
    if found is None:
        raise HTTPException(404)
    return {"id": number, "words": found[0]}
