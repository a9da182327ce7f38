"""A TCP proxy whose network may fall silent."""

import contextlib
import socket
import threading
from typing import Self

_CHUNK = 65536


class Proxy:
    """A context manager that forwards 127.0.0.1:`port` to the port `target`.

    In silence, nothing passes and no side is told. Connections from before stay half-open for ever.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._lost = threading.Event()
        """Set in a silence; its connections and those from before keep it."""
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):  # closed by the other side
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def silence(self, is_silent: bool) -> None:
        if is_silent:
            self._lost.set()
        else:
            self._lost = threading.Event()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server, lost = socket.create_connection(("127.0.0.1", self._target)), self._lost
                self._sockets += (client, server)
                for source, sink in ((client, server), (server, client)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=_pump, args=[source, sink, lost], daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, lost: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            if not lost.is_set():
                sink.sendall(data)
        if not lost.is_set():
            sink.shutdown(socket.SHUT_WR)
