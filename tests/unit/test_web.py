"""The pages of a worker when something is wrong with them. No Redis."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from taskrunner import ConfigurationError
from taskrunner.cli import probes
from taskrunner.cli.web import Answer, WebServer, text


def broken() -> Answer:
    raise ValueError("no figures")


def untold() -> str | None:
    raise OSError("no answer")


@pytest.fixture
def web() -> Iterator[WebServer]:
    """A server with a page that fails, a probe that can't tell, and a good page."""
    pages = {"/broken": broken, "/good": lambda: text(200, "good"), **probes.pages(untold)}
    server = WebServer(0, "--port", pages)
    server.start()
    yield server
    server.stop()
    server.join(5)


def get(server: WebServer, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def test_a_page_that_fails_says_why_and_the_others_go_on(web: WebServer) -> None:
    """Whoever scrapes sees an error, not a connection that was closed."""
    assert get(web, "/broken") == (500, "ValueError: no figures")
    assert get(web, "/good") == (200, "good")
    assert get(web, "/live") == (200, "alive")


def test_a_probe_that_can_not_tell_is_not_ready(web: WebServer) -> None:
    """Neither well nor an error of the server: traffic goes elsewhere."""
    assert get(web, "/ready") == (503, "OSError: no answer")


def test_an_unknown_page_is_told_which_there_are(web: WebServer) -> None:
    """And HEAD, which load balancers ask with, gets no body."""
    assert get(web, "/god") == (404, "there are /broken and /good and /live and /ready")
    assert get(web, "/good/?probe=1") == (200, "good")
    assert get(web, "/good", "HEAD") == (200, "")


def test_a_port_that_is_taken_names_its_option(web: WebServer) -> None:
    """At once, not when the first probe fails."""
    with pytest.raises(ConfigurationError, match=rf"--health-port {web.port}: .*in use"):
        WebServer(web.port, "--health-port", {})
