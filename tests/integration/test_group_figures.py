"""The group's figures for a page of metrics, where Redis answers but does not give them."""

import pytest

from taskrunner import RedisStreamQueue, Registry, TaskRunner, keys
from taskrunner.cli.embedded import EmbeddedServer
from taskrunner.group_figures import GroupReader
from tests.support import eventually
from tests.support.names import Names


def test_what_redis_refuses_to_tell_is_logged_once(
    server: EmbeddedServer, names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    """The page says only that there are no figures: the log says why, and when that is over."""
    queue = RedisStreamQueue(server.url, prefix=names.prefix)
    reader = GroupReader(TaskRunner(consumer_group=names.group, queue=queue, registry=Registry()))
    caplog.set_level("INFO", "taskrunner")
    queue.connections.call("SET", keys.metrics(names.group), "no hash")
    assert [reader.figures() for _ in range(3)] == [None] * 3
    queue.connections.call("DEL", keys.metrics(names.group))
    eventually(reader.figures, 10)

    refused, over = caplog.messages
    assert "metrics of the group" in refused
    assert "WRONGTYPE" in refused
    assert "recovered" in over
