"""A TCP proxy that cuts connections at an exact byte."""

import math
import socket
import threading
from contextlib import suppress


class CuttingProxy:
    """Forwards TCP to `target`. `cut_up_at` and `cut_down_at`: total bytes of that way, towards the server or back,
    that are not reached; what would reach them is dropped and every connection is cut, once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.cut_up_at = self.cut_down_at = math.inf
        self.up_bytes = self.down_bytes = 0
        self.cuts = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        connections, self._open = self._open, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            try:
                upstream = socket.create_connection((host, int(port)))
            except OSError:
                client.close()
                continue
            self._open += [client, upstream]
            for way in ((client, upstream, "up"), (upstream, client, "down")):
                threading.Thread(target=self._forward, args=way, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        counter, limit = f"{way}_bytes", f"cut_{way}_at"
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if getattr(self, counter) + len(data) > getattr(self, limit):
                    setattr(self, limit, math.inf)
                    self.cuts += 1
                    self.cut()
                sink.sendall(data)
                setattr(self, counter, getattr(self, counter) + len(data))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
