"""A Postgres server for the tests: Debian's programs, a temporary directory, a Unix socket, and a user who is not root."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

MISSING = (
    "no Postgres server here: apt-get install postgresql (no running service is needed, the tests start their own)"
)
PLACE = "ostpg-"
"""What the name of a server's directory begins with."""


def binaries() -> Path | None:
    """The directory of initdb and postgres in their newest version, or None if they are not installed."""
    places = [
        *sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True),
        *(Path(found).resolve().parent for found in [shutil.which("postgres")] if found),
    ]
    return next((place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None)


@contextlib.contextmanager
def started():
    """A running server until the end of the block; the test is skipped where its programs are not installed."""
    found = binaries()
    if found is None:
        pytest.skip(MISSING)
    server = PostgresServer(found)
    try:
        server.start()
        yield server
    finally:
        server.remove()


class PostgresServer:
    """One cluster. `url` names its database `postgres`; many tests share it, each in a schema of its own."""

    def __init__(self, bin: Path, place: Path | None = None) -> None:
        """`place`: the directory to make the cluster in. None: in memory, if the system has a writable /dev/shm."""
        self._bin = bin
        memory = Path("/dev/shm")
        place = place or (memory if os.access(memory, os.W_OK) else Path("/tmp"))  # a socket's path must be short
        self.directory = Path(tempfile.mkdtemp(prefix=PLACE, dir=place))
        self._user: dict[str, Any] = {}
        self.owner = pwd.getpwuid(os.getuid()).pw_name
        if os.getuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            self.owner = nobody.pw_name
            os.chown(self.directory, nobody.pw_uid, nobody.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://{self.owner}@/postgres?host={self.directory}"
        self._run("initdb", "-D", "data", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")

    def start(self, **more: str) -> None:
        """Start the server, with more settings, and wait until it accepts clients. After a kill it recovers first."""
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.directory), "max_connections": "60"}
        settings["dynamic_shared_memory_type"] = "mmap"  # so that a kill leaves nothing behind outside of the directory
        options = [part for name, value in (settings | more).items() for part in ("-c", f"{name}={value}")]
        log = (self.directory / "log").open("ab")
        command = [self._bin / "postgres", "-D", "data", *options]
        self._process = subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log, **self._user)
        log.close()
        reached = ("-h", str(self.directory), "-p", more.get("port", "5432"))
        while self._run("pg_isready", "-q", *reached, check=False):
            if self._process.poll() is not None:
                raise RuntimeError((self.directory / "log").read_text()[-3000:])

    def kill(self) -> None:
        """Send SIGKILL to the postmaster and its children; nothing is flushed."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Fast shutdown: clients are disconnected."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait()

    def remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self, program: str, *arguments: str, check: bool = True) -> int:
        done = subprocess.run(
            [self._bin / program, *arguments], cwd=self.directory, capture_output=True, **self._user, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.decode()}")
        return done.returncode
