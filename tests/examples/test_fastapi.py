"""`examples/fastapi`, started as its README says, called over HTTP."""

import threading
from collections.abc import Callable

import pytest

from tests.support import eventually
from tests.support.server import OwnServer
from tests.support.site import Site

pytest.importorskip("fastapi")


@pytest.fixture
def site(make_site: Callable[[str], Site]) -> Site:
    """The copied example."""
    return make_site("fastapi")


@pytest.mark.parametrize("path", ["/reports", "/async/reports"])
def test_a_report_gets_its_words_from_the_worker(site: Site, path: str) -> None:
    """Dispatched from a plain endpoint, and from a coroutine."""
    site.serve("uvicorn app:app --port 8000")
    site.work("taskrunner worker app:runner")
    status, report = site.call("POST", path, {"text": "as many words as these"})
    assert status == 202, site.log

    wanted = {"id": report["id"], "words": 5}
    eventually(
        lambda: site.call("GET", f"/reports/{report['id']}") == (200, wanted),
        message=lambda: site.log,
    )
    assert site.call("GET", "/reports/99")[0] == 404


def test_other_requests_are_answered_while_a_coroutine_waits_for_redis(
    site: Site, redis_server: OwnServer
) -> None:
    """`.delay` in a thread holds up its own request only."""
    site.serve("uvicorn app:app --port 8000")
    assert site.call("POST", "/async/reports", {"text": "one"})[0] == 202

    redis_server.pause()
    try:
        answers: list[int] = []
        waiting = threading.Thread(
            target=lambda: answers.append(site.call("POST", "/async/reports", {"text": "two"})[0])
        )
        waiting.start()
        eventually(lambda: site.call("GET", "/reports/2")[0] == 200)  # stored: it dispatches now
        assert not answers
    finally:
        redis_server.resume()
    waiting.join(20)
    assert answers == [202], site.log
