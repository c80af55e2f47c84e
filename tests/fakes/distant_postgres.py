"""A proxy that makes a Postgres server look far away: it delays every message, and counts round trips.

    client ──▶ DistantPostgres (a Unix socket) ──▶ the server's Unix socket

`trips` counts how often a client sent after it had received from the server: each is a round trip that the client waited for.
`connections` is the number of connections made. Inside `silent` nothing passes either way, as on a cut line, and neither side is told.
"""

import contextlib
import queue
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

_NAME = ".s.PGSQL.5432"


class DistantPostgres:
    """Example: ``with DistantPostgres(server.directory, round_trip_s=0.035) as far: PostgresLog.open(far.of(config))``"""

    def __init__(self, directory: Path, round_trip_s: float = 0.0):
        self.trips, self.connections, self.round_trip_s = 0, 0, round_trip_s
        self._server = str(directory / _NAME)
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []

    def __enter__(self):
        self.directory = Path(tempfile.mkdtemp(prefix="ostfar-"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / _NAME))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._open.set()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        shutil.rmtree(self.directory)

    def of(self, config):
        """The configuration of the same log, reached through this proxy."""
        return config.model_copy(update={"url": config.url.partition("?")[0] + f"?host={self.directory}"})

    @contextlib.contextmanager
    def silent(self):
        """Carry nothing in either direction inside the block."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                self._sockets += [client, server]
                heard = threading.Event()
                heard.set()
                self._carry(client, server, lambda heard=heard: self._count(heard))
                self._carry(server, client, heard.set)

    def _count(self, heard):
        if heard.is_set():
            heard.clear()
            self.trips += 1

    def _carry(self, source, sink, on_pass):
        """Start two threads that pass data on half a round trip later, in order."""
        flying = queue.Queue()

        def take():
            data = b"?"
            while data:
                with contextlib.suppress(OSError):
                    data = source.recv(1 << 16)
                    flying.put((time.monotonic() + self.round_trip_s / 2, data))
                    continue
                flying.put((0.0, b""))
                return

        def give():
            with contextlib.suppress(OSError):
                while True:
                    due, data = flying.get()
                    time.sleep(max(0.0, due - time.monotonic()))
                    self._open.wait()
                    if not data:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    on_pass()
                    sink.sendall(data)

        threading.Thread(target=take, daemon=True).start()
        threading.Thread(target=give, daemon=True).start()
