"""The two servers that all hosts reach: Postgres, with a password, and an S3 object store."""

from __future__ import annotations

import contextlib
import pwd
import sys
import time
from pathlib import Path

import psutil
from tests.examinations.hosts.lab import PLACE, Host, Process
from tests.examinations.hosts.settings import BUCKET_PORT, SECRETS
from tests.fakes.postgres_server import binaries

_BASE = PLACE / "postgres"


def kill_all(process: Process) -> None:
    """Send SIGKILL to a program and all its descendants; nothing is flushed."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # Postgres' children end by themselves without the postmaster
            child.kill()
    process.wait(10)


class PostgresHost:
    """Debian's Postgres, as an unprivileged user, on its host's address; the role `loop` owns the database `loop`."""

    def __init__(self, host: Host) -> None:
        found, nobody = binaries(), pwd.getpwnam("nobody")
        assert found is not None
        self._bin: Path = found
        self._host, self._user = host, f"{nobody.pw_uid}:{nobody.pw_gid}"
        self.process: Process | None = None

    def make(self) -> None:
        """Make and start the cluster, with its role and database."""
        self._host.run("install", "-d", "-m", "700", "-o", self._user.split(":")[0], _BASE)
        (self._host.directory / "secret").write_text("examination-superuser-0123\n")
        (self._host.directory / "secret").chmod(0o644)  # the host has no other users
        self._run("initdb", "-D", _BASE / "data", "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={PLACE / 'secret'}", "-N",
                  "-E", "UTF8", "--locale=C")  # fmt: skip
        with (self._host.directory / "postgres" / "data" / "pg_hba.conf").open("a") as file:
            file.write("host loop loop 10.77.0.0/24 scram-sha-256\n")
        self.start()
        for statement in (
            f"CREATE ROLE loop LOGIN PASSWORD '{SECRETS['LOG_PASSWORD']}'",
            "CREATE DATABASE loop OWNER loop",
        ):
            self._run("psql", "-h", _BASE, "-U", "postgres", "-c", statement, PGPASSWORD="examination-superuser-0123")

    def start(self) -> None:
        """Start the server and wait until it accepts clients. After a kill it recovers first."""
        options = [f"listen_addresses={self._host.address}", f"unix_socket_directories={_BASE}", "max_connections=100"]
        words = [self._bin / "postgres", "-D", _BASE / "data", *(word for option in options for word in ("-c", option))]
        self.process = self._host.start("postgres", *words, user=self._user)
        while self._run("pg_isready", "-h", self._host.address, "-d", "loop", check=False).find("accepting") < 0:
            if not self.process.running:
                raise RuntimeError((self._host.directory / "postgres.log").read_text()[-3000:])
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the postmaster and its children."""
        assert self.process is not None
        kill_all(self.process)

    def _run(self, program: str, *words: object, check: bool = True, **environment: str) -> str:
        return self._host.run(self._bin / program, *words, user=self._user, check=check, **environment)


_MAKE_BUCKET = """
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="PUT")).read()
        break
    except OSError:
        time.sleep(0.2)
"""


def start_bucket(host: Host) -> Process:
    """Start moto's S3 server, which keeps objects in memory, with the bucket `weights`."""
    server = host.start("bucket", sys.executable, "-m", "moto.server", "-H", host.address, "-p", BUCKET_PORT)
    host.run(sys.executable, "-c", _MAKE_BUCKET, f"http://{host.address}:{BUCKET_PORT}/weights")
    return server
