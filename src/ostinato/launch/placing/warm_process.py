"""The fork server's process: it imports the workers' libraries once, computes nothing, and forks a worker for each request of `warm`.

A worker is double-forked: the first child forks the worker and ends, so that the kernel reparents the worker to the supervisor, which is a
subreaper at that moment. So the supervisor is the worker's parent in every respect, and the worker survives the end of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from ostinato.core.interpreter import collecting_rarely
from ostinato.launch.placing.heartbeat import die_with_parent

LIBRARIES = (
    "ostinato.cli.commands",
    "ostinato.launch.workers.worker_main",
    "ostinato.launch.workers.serve",
    *(f"ostinato.model.{name}" for name in ("load", "renderer", "selftest")),
    "ostinato.engine.embedded.engine",
    *("uvloop", "obstore.store", "numba.np.arrayobj", "transformers.modeling_layers"),
)
"""The imports of the serving worker (the last ones happen while it loads a model), which include nearly all of the other workers'."""
READY, GO = b"ready", b"1"
"""This process's message once it can fork, and the go signal that a forked worker reads from the last file of its request."""
MOST_BYTES, MOST_FILES = 1 << 17, 16
"""Limits of a request, which is a datagram: its bytes, mostly the environment, and its file descriptors."""
ARGV_ROOM = 4096
"""Characters reserved in this process's command line, over which a worker's command line is written."""
_REPARENT_POLL_S = 0.001


def main() -> None:
    """Import the libraries, report whether workers can be forked, and fork one per request until the supervisor ends.

    Returns only in a forked worker.
    """
    die_with_parent()
    line = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    with collecting_rarely():
        for name in sys.argv[2:-1]:
            importlib.import_module(name)
    written = {name: value for name, value in os.environ.items() if before.get(name) != value}  # by the imports
    gc.freeze()  # otherwise a garbage collection in a worker would copy every shared page
    name_process([*sys.orig_argv[:3]])
    line.send(unfit(line.fileno()).encode() or READY)
    while True:
        data, fds, _, _ = socket.recv_fds(line, MOST_BYTES, MOST_FILES)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if (pid := fork()) == 0:
            line.close()
            if os.read(fds[-1], len(GO)) != GO:  # the supervisor has ended or given this worker up
                os._exit(0)
            os.close(fds[-1])
            run(request, fds[:-1], written)
            return
        line.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def fork() -> int:
    """Double-fork a process that is not a child of this one. Return its pid, -1 if the system has no room for it, 0 in that process."""
    ours, theirs = os.pipe()
    helper = _forked()
    if helper == 0:
        helper, worker = os.getpid(), _forked()
        if worker != 0:
            os.write(theirs, b"%d" % worker)
            os._exit(0)
        os.close(ours)
        os.close(theirs)
        while os.getppid() == helper:
            time.sleep(_REPARENT_POLL_S)
        return 0
    os.close(theirs)
    reply = os.read(ours, 32)
    os.close(ours)
    if helper > 0:
        os.waitpid(helper, 0)
    return int(reply or b"-1")


def _forked() -> int:
    try:
        return os.fork()
    except OSError:
        return -1


def unfit(line: int) -> str:
    """Return why this process cannot fork workers; "" if it can. `line`: the only file descriptor that it may have open.

    A fork loses all other threads, its file descriptors may collide with those of a library, and a GPU driver does not survive it.
    """
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        return f"{threads} threads"
    for number in sorted({int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, line}):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            return f"{os.readlink(f'/proc/self/fd/{number}')} is open"
    return ""


def run(request: dict[str, Any], fds: Sequence[int], written: dict[str, str]) -> None:
    """Become the process that `python -m` would start with the request's arguments, files and environment.

    `written`: the environment variables that the imports have set.
    """
    os.setsid()
    words: list[str] = request["words"]
    move_descriptors([os.open(os.devnull, os.O_RDONLY), *fds], [0, 1, 2, *request["fds"]])
    sys.stdout, sys.stderr = reopened(sys.stdout), reopened(sys.stderr)
    os.environ.clear()
    os.environ.update(written | request["env"])
    os.chdir(request["cwd"])
    name_process([sys.executable, "-m", *words])
    reseed()
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as for every `python -m`
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def reseed() -> None:
    """Reseed numpy's global generator. Python and OpenSSL reseed themselves after a fork; torch always starts with the same seed."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def move_descriptors(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Move open file descriptors to these numbers and make them inheritable."""
    free = max([*numbers, *files]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in files]
    for fd in {*files} - {*numbers}:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def reopened(stream: TextIO) -> TextIO:
    """Reopen a stream on the file that now has its descriptor, since the old stream remembers whether the old file was seekable."""
    now, file = cast("io.TextIOWrapper", stream), io.FileIO(stream.fileno(), "wb", closefd=False)
    unbuffered = isinstance(now.buffer, io.RawIOBase)  # by `python -u` or PYTHONUNBUFFERED
    return io.TextIOWrapper(
        cast("io.BufferedWriter", file) if unbuffered else io.BufferedWriter(file),
        encoding=now.encoding,
        errors=now.errors,
        line_buffering=now.line_buffering,
        write_through=now.write_through,
    )


def name_process(words: Sequence[str]) -> None:
    """Overwrite this process's command line, as shown by `ps` and /proc; truncated if too long."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # /proc does not give the command line's address
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
        if start and room > 1:
            ctypes.memmove(start, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main()
