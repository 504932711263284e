"""`examples/django`, started as its README says, called over HTTP."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import eventually, stays
from tests.support.server import OwnServer
from tests.support.site import Site

pytest.importorskip("django")


@pytest.fixture
def site(make_site: Callable[[str], Site]) -> Site:
    """With its tables, served by Django's own server."""
    made = make_site("django")
    made.run("python manage.py migrate")
    made.serve("python manage.py runserver 8000")
    return made


def test_what_is_rolled_back_dispatches_nothing(site: Site, redis_server: OwnServer) -> None:
    """The task waits for the commit, and there is none."""
    with redis_server.client() as client:
        refused = site.call("POST", "/orders", {"item": "tea", "quantity": 11})
        assert refused == (409, {"error": "out of stock"})
        assert client.dbsize() == 0

        assert site.call("POST", "/orders", {"item": "tea", "quantity": 10})[0] == 202
        assert client.dbsize() == 1
        assert site.call("GET", "/orders/1")[1]["receipt"] == ""  # nobody works


def test_orders_get_their_receipts_and_no_connection_outlives_its_task(site: Site) -> None:
    """POST stores and dispatches, the worker writes, GET shows it; after_task closes what each of
    the tasks has opened."""
    worker = site.work("taskrunner worker shop.worker:runner")
    for number in range(1, 21):
        status, order = site.call("POST", "/orders", {"item": "tea", "quantity": 2})
        assert (status, order) == (202, {"id": number}), site.log
    for number in range(1, 21):
        wanted = {"id": number, "item": "tea", "receipt": "2 x tea"}
        eventually(
            lambda number=number, wanted=wanted: (
                site.call("GET", f"/orders/{number}") == (200, wanted)
            ),
            message=lambda: site.log,
        )

    def opened() -> list[str]:
        links = Path(f"/proc/{worker.pid}/fd").iterdir()
        targets = [str(link.readlink()) for link in links]
        return [target for target in targets if target.endswith("db.sqlite3")]

    if Path("/proc/self/fd").exists():
        eventually(lambda: not opened(), message=lambda: str(opened()))
        stays(lambda: not opened(), 0.3)


def test_its_own_tests_pass_without_a_server(
    make_site: Callable[[str], Site], redis_server: OwnServer
) -> None:
    """What an application tests with `eager` needs no Redis."""
    redis_server.kill()
    site = make_site("django")
    site.run("python manage.py test")
    assert "Ran 2 tests" in site.log
