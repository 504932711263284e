"""A worker does not grow with what it has done."""

from collections.abc import Callable

import pytest

from tests.support import Desk, OwnServer, WorkerProcess, eventually
from tests.support.worker import DEFAULTS

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

MIB = 1024 * 1024


def test_resident_size_stays_from_20_000_to_200_000_tasks(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """Within 5 MiB, with default settings."""
    server = own_server()
    desk = make_desk(server.url)
    worker = make_worker(url=server.url, **DEFAULTS)
    sizes, done = [], 0
    for number in (20_000, 180_000):
        for _ in range(number // 20_000):
            desk.send("noop", range(20_000))
        eventually(lambda: desk.length() == 0, 90, interval=0.1, message=worker.log)
        done += number
        eventually(lambda: _counted(desk) == done, 10)  # noqa: B023
        sizes.append(worker.rss_bytes())
    after_20_000, after_200_000 = sizes
    print(
        f"{after_20_000 / MIB:.1f} MiB after 20,000 tasks, {after_200_000 / MIB:.1f} MiB after 200,000"
    )
    assert after_200_000 - after_20_000 <= 5 * MIB


def _counted(desk: Desk) -> int:
    """How many runs the workers have entered in the group's timings."""
    return int(desk.client.hget(desk.names.metrics, "noop_count") or 0)  # type: ignore[arg-type]
