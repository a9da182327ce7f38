"""A TCP proxy whose network the test breaks: cut, silent, slow."""

from __future__ import annotations

import socket
import threading
import time
from typing import Literal

Network = Literal["whole", "cut", "silent"]
_CHUNK = 65536


class Proxy:
    """Passes what it hears on 127.0.0.1:`port` to `target`, a port too; a context manager.

    Its `network` is

    - `whole`: everything passes, each packet `delay` seconds late;
    - `cut`: all connections are reset, new ones are refused;
    - `silent`: nothing passes and nobody is told. A connection that lived through it stays half-open: it is
      never served nor closed, also when the network is whole again.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.delay = 0.0
        self.num_connections = 0
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._closing = False
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]
        self._network: Network = "whole"

    def __enter__(self) -> Proxy:
        self._accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.set("cut")

    def set(self, network: Network) -> None:
        """Change the network."""
        with self._lock:
            before, self._network = self._network, network
            if network == "cut" and before != "cut":
                self._listener.shutdown(socket.SHUT_RDWR)
                self._listener.close()
                for pair in self._pairs:
                    pair.reset()
                self._pairs.clear()
            elif network == "silent":
                for pair in self._pairs:
                    pair.is_lost = True
            if before == "cut" and network != "cut":
                self._listener = self._listen(self.port)
                self._accept()

    @staticmethod
    def _listen(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        return listener

    def _accept(self) -> None:
        threading.Thread(target=self._serve, args=[self._listener], daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                self.num_connections += 1
                pair = _Pair(self, client, self._target, is_lost=self._network == "silent")
                self._pairs.append(pair)


class _Pair:
    """A client's connection and the one to the target for it."""

    def __init__(self, proxy: Proxy, client: socket.socket, target: int, *, is_lost: bool) -> None:
        self._proxy = proxy
        self.is_lost = is_lost
        server = socket.create_connection(("127.0.0.1", target))
        self._sockets = (client, server)
        for one in self._sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=[source, sink], daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(_CHUNK):
                time.sleep(self._proxy.delay)
                if not self.is_lost:
                    sink.sendall(data)
            if not self.is_lost:
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            self.reset()

    def reset(self) -> None:
        for one in self._sockets:
            try:
                # Closed with RST, as by a host that knows nothing of the connection.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed by the other side
            one.close()
