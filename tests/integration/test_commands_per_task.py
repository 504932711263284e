"""How much the server is asked for each task."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import Desk, OwnServer, WorkerProcess, eventually
from tests.support.worker import DEFAULTS

pytestmark = pytest.mark.chaos

TASKS = 20_000


def test_draining_takes_less_than_a_tenth_of_a_command_for_each_task(
    own_server: Callable[..., OwnServer],
    make_desk: Callable[..., Desk],
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """With default settings, whatever is called inside scripts counted too; nothing scans."""
    server = own_server()
    desk = make_desk(server.url)
    desk.send("noop", range(TASKS))
    desk.client.config_resetstat()
    worker = make_worker(url=server.url, wait=False, **DEFAULTS)
    looks = 0

    def drained() -> bool:
        nonlocal looks
        looks += 1
        return desk.length() == 0

    eventually(drained, 60, interval=0.2, message=worker.log)
    stats: dict[str, Any] = desk.client.info("commandstats")
    calls = {
        name.removeprefix("cmdstat_").upper(): int(figures["calls"])
        for name, figures in stats.items()
    }
    calls["XLEN"] = calls.get("XLEN", 0) - looks
    calls["CONFIG|RESETSTAT"] = 0
    per_task = sum(calls.values()) / TASKS
    print(f"{per_task:.4f} commands per task: {dict(sorted(calls.items(), key=lambda c: -c[1]))}")
    assert per_task < 0.1
    assert not {"KEYS", "SCAN", "INFO"} & {name for name, times in calls.items() if times}
    assert calls["XREADGROUP"] >= TASKS / 100
