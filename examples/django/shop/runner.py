"""The project's TaskRunner: the web processes dispatch with it, worker processes run it."""

from django.conf import settings
from django.db import close_old_connections

from taskrunner import TaskRunner

# What Django does around each request is done around each task, in its thread: a connection that
# broke, was left in a transaction, or is older than CONN_MAX_AGE, is closed; the next query opens
# a new one.
runner = TaskRunner(
    before_task=lambda context: close_old_connections(),
    after_task=lambda context, error: close_old_connections(),
    **settings.TASKRUNNER,
)
