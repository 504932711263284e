"""Floor 5. `taskrunner redis`: a server for trying things out, until Ctrl-C.

A Redis or Valkey that is installed on this machine, else the one of the extra `embedded`. It
listens on this machine only, without a password, and what it holds ends with it.
"""

import argparse
import time
from typing import Final

from taskrunner.cli.arguments import tcp_port
from taskrunner.cli.embedded import EmbeddedServer, ServerStartError

HELP: Final = "a server for trying things out"

_LOOK: Final = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `taskrunner redis`."""
    parser.add_argument("--port", type=tcp_port, default=6379, metavar="P", help="(default: 6379)")


def run(arguments: argparse.Namespace) -> int:
    """Start it and stay until interrupted."""
    server = EmbeddedServer(port=arguments.port)
    try:
        server.start()
    except ServerStartError as error:
        if "Address already in use" not in str(error):
            raise
        raise ServerStartError(
            f"port {arguments.port} is in use: if a Redis answers there, use that one, else give "
            "another port with --port"
        ) from None
    with server:
        url = f"redis://localhost:{server.port}/0"
        print(f"{url} answers until Ctrl-C, and keeps nothing on disk", flush=True)
        while server.running:
            time.sleep(_LOOK)
        raise ServerStartError(f"the server has ended; its log:\n{server.log()}")
