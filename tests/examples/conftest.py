"""Fixtures for the tests of `examples/`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.server import OwnServer
from tests.support.site import Site


@pytest.fixture
def redis_server(own_server: Callable[..., OwnServer]) -> OwnServer:
    """A server of the test's own: the examples' groups and keys have fixed names."""
    return own_server()


@pytest.fixture
def make_site(redis_server: OwnServer, tmp_path: Path) -> Iterator[Callable[[str], Site]]:
    """Copy an example: `make_site("flask")`."""
    made: list[Site] = []

    def make(name: str) -> Site:
        site = Site(name, tmp_path, redis_server.tcp_url)
        made.append(site)
        return site

    yield make
    for site in made:
        site.close()
