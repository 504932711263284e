"""Say what a process of this row meets: `python -m tests.matrix.seen`, for `tests.matrix`.

A row that is meant to run on something else than it does would prove nothing.
"""

import json
import os
from typing import Any

import redis

from taskrunner import RedisStreamQueue
from taskrunner.cli.embedded import EmbeddedServer
from tests.matrix.rows import AS_FOUND


def main() -> None:
    with EmbeddedServer() as server:
        queue = RedisStreamQueue(server.url)
        with redis.Redis.from_url(server.url) as client:
            info: Any = client.info("server")
        connections = queue.connections
        given = connections._pool.connection_kwargs
        parser = type(connections.open()._connection._parser).__name__
        name = "valkey" if "valkey_version" in info else "redis"
        row = {
            "server": f"{name}-{info.get('valkey_version', info['redis_version'])}",
            "redis_py": redis.__version__,
            "protocol": f"RESP{given['protocol']}",
            "parser": "hiredis" if "Hiredis" in parser else "python",
            "decode_responses": "on" if given["decode_responses"] else "off",
            "taken_for": AS_FOUND
            if queue._idle_filter is None
            else os.environ["TASKRUNNER_TEST_REDIS_VERSION"],
        }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
