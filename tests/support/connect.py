"""The client of a test's process: from a URL, or from sentinels as an application does it.

`sentinel://127.0.0.1:5001,127.0.0.1:5002/jobs` is no URL of redis-py: it names the sentinels and the
service, for programs that are told all they need in one line.
"""

from typing import Any
from urllib.parse import urlsplit

import redis
from redis.sentinel import Sentinel


def connect(url: str, **options: Any) -> redis.Redis:
    """Return a client; `options` as for `redis.Redis`."""
    parts = urlsplit(url)
    if parts.scheme != "sentinel":
        return redis.Redis.from_url(url, **options)
    sentinels = [
        (host, int(port)) for host, port in (one.split(":") for one in parts.netloc.split(","))
    ]
    manager = Sentinel(sentinels, socket_timeout=1)
    client: redis.Redis = manager.master_for(parts.path.strip("/"), socket_timeout=2, **options)
    return client
