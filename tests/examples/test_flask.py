"""`examples/flask`, started as its README says, called over HTTP."""

from collections.abc import Callable

import pytest

from tests.support import eventually
from tests.support.site import Site

pytest.importorskip("flask")

REPORT = {"text": "as many words as these"}


@pytest.mark.parametrize(
    "server", ["flask run --port 8000", "gunicorn --preload --workers 4 --bind :8000 app:app"]
)
def test_a_report_gets_its_words_from_the_worker(
    make_site: Callable[[str], Site], server: str
) -> None:
    """Tasks run in an app context; a server that forks after the import dispatches as well."""
    site = make_site("flask")
    site.serve(server)
    site.work("taskrunner worker app:runner")

    numbers = []
    for _ in range(20):
        status, report = site.call("POST", "/reports", REPORT)
        assert status == 202, site.log
        numbers.append(report["id"])
    for number in numbers:
        eventually(
            lambda number=number: (
                site.call("GET", f"/reports/{number}") == (200, {"id": number, "words": 5})
            ),
            message=lambda: site.log,
        )
    assert len(set(numbers)) == 20
    assert site.call("GET", "/reports/99")[0] == 404
    assert "Traceback" not in site.log
