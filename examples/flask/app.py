"""Reports: a text comes in over HTTP, a worker counts its words."""

import sqlite3
from contextvars import ContextVar
from pathlib import Path

from flask import Flask, abort, g, request
from flask.ctx import AppContext

from taskrunner import TaskRunner, task

app = Flask(__name__)
app.config["DATABASE"] = Path(__file__).with_name("reports.sqlite3")

# --- an app context around each task, as Flask has one around each request ---

_pushed: ContextVar[AppContext] = ContextVar("pushed")  # a task has a context of its own


def push_app_context(context):
    app_context = app.app_context()
    app_context.push()
    _pushed.set(app_context)


def pop_app_context(context, error):
    _pushed.get().pop(error)  # runs what @app.teardown_appcontext has registered


runner = TaskRunner(
    consumer_group="reports", before_task=push_app_context, after_task=pop_app_context
)

# --- the database: a connection an app context ---


def database():
    if "database" not in g:
        g.database = sqlite3.connect(app.config["DATABASE"], timeout=20)
        g.database.execute("CREATE TABLE IF NOT EXISTS report (text TEXT, words INTEGER)")
    return g.database


@app.teardown_appcontext
def close_database(error):
    if "database" in g:
        g.database.close()


# --- the task, and the two views ---


@task(name="count-words", max_retry=5)
def count_words(payload):
    (text,) = (
        database()
        .execute("SELECT text FROM report WHERE rowid = ?", [payload["report"]])
        .fetchone()
    )
    with database() as connection:
        connection.execute(
            "UPDATE report SET words = ? WHERE rowid = ?", [len(text.split()), payload["report"]]
        )


@app.post("/reports")
def create():
    with database() as connection:  # commits
        row = connection.execute("INSERT INTO report VALUES (?, NULL)", [request.json["text"]])
    count_words.delay({"report": row.lastrowid})
    return {"id": row.lastrowid}, 202


@app.get("/reports/<int:number>")
def show(number):
    found = (
        database().execute("SELECT words FROM report WHERE rowid = ?", [number]).fetchone()
    ) or abort(404)
    return {"id": number, "words": found[0]}
