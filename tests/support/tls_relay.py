"""TLS before a server that was built without it: the client's side of it is real.

Takes TLS on a port of 127.0.0.1 and speaks plainly to a Unix socket, as stunnel would.
"""

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path


class TlsRelay:
    """Relays until `close()`; `clients` with a CA: theirs must be signed by it."""

    def __init__(
        self, target: Path, port: int, *, certificate: str, key: str, clients: str | None = None
    ) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        if clients is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(clients)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._accept, name="tls-accept", daemon=True).start()

    def close(self) -> None:
        """Take no more; connections end with their servers and clients."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError), plain, socket.socket(socket.AF_UNIX) as server:
            plain.settimeout(10)
            with self._context.wrap_socket(plain, server_side=True) as client:
                client.settimeout(None)
                server.connect(str(self._target))
                back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
                back.start()
                self._pump(client, server)
                back.join()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):  # the other direction goes on until its own end
            socket.socket.shutdown(sink, socket.SHUT_WR)
