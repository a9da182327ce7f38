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
        self._is_silent = False
        self._lost: list[threading.Event] = []
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
        """Change the network."""
        self._is_silent = is_silent
        for lost in self._lost if is_silent else ():
            lost.set()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server, lost = socket.create_connection(("127.0.0.1", self._target)), threading.Event()
                self._lost.append(lost)
                self._sockets += (client, server)
                if self._is_silent:
                    lost.set()
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
