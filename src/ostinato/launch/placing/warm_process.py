"""The process that workers are forked from: it imports what they import once, computes nothing, and is told what to fork by `warm`.

A worker is forked twice: the first child only forks it and ends, so that the kernel gives the worker to the supervisor, which is a reaper
of orphans for that moment. The supervisor is then the worker's parent in every respect, and the end of this process harms no worker.
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
"""What the serving worker imports, the last of it while it loads a model, and with it nearly all that the others do."""
READY, GO = b"ready", b"1"
"""What this process says once it can fork, and what a forked worker is told, by the last file of its request, once it may begin."""
MOST_BYTES, MOST_FILES = 1 << 17, 16
"""Of a request, which is a datagram: the environment above all; and of the files that come with it."""
ROOM = 4096
"""Characters of this process's command line, into which the workers' own are written."""
_LOOK_S = 0.001


def main() -> None:
    """Import, say whether workers can be forked, and fork one for each request until the supervisor ends. Returns in a worker."""
    die_with_parent()
    line = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    with collecting_rarely():
        for name in sys.argv[2:-1]:
            importlib.import_module(name)
    written = {name: value for name, value in os.environ.items() if before.get(name) != value}  # as in any worker
    gc.freeze()  # a collection in a worker would copy every page of it
    name_process([*sys.orig_argv[:3]])
    line.send(unfit(line.fileno()).encode() or READY)
    while True:
        data, fds, _, _ = socket.recv_fds(line, MOST_BYTES, MOST_FILES)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if (pid := fork()) == 0:
            line.close()
            if os.read(fds[-1], len(GO)) != GO:  # the supervisor has ended, or counts on no such worker
                os._exit(0)
            os.close(fds[-1])
            run(request, fds[:-1], written)
            return
        line.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def fork() -> int:
    """Fork a process that is no child of this one. Returns its pid, or -1 if the system has no room for it; 0 in that process."""
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
            time.sleep(_LOOK_S)
        return 0
    os.close(theirs)
    told = os.read(ours, 32)
    os.close(ours)
    if helper > 0:
        os.waitpid(helper, 0)
    return int(told or b"-1")


def _forked() -> int:
    try:
        return os.fork()
    except OSError:
        return -1


def unfit(line: int) -> str:
    """Why nothing can be forked from this process, which has one connection; "" if workers can be.

    A fork has none of the threads, its files get numbers that a library's file may have, and a GPU's driver does not work in it.
    """
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        return f"{threads} threads"
    for number in sorted({int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, line}):
        with contextlib.suppress(OSError):  # what listed them
            return f"{os.readlink(f'/proc/self/fd/{number}')} is open"
    return ""


def run(request: dict[str, Any], fds: Sequence[int], written: dict[str, str]) -> None:
    """Be the process that `python -m` with these words starts, with these files and this environment. `written`: by libraries' imports."""
    os.setsid()
    words: list[str] = request["words"]
    place([os.open(os.devnull, os.O_RDONLY), *fds], [0, 1, 2, *request["fds"]])
    sys.stdout, sys.stderr = anew(sys.stdout), anew(sys.stderr)
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
    """Have numpy draw numbers of its own, as Python and OpenSSL do by themselves after a fork. torch always starts with the same seed."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files these numbers, at which they outlive an exec."""
    free = max([*numbers, *files]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in files]
    for fd in {*files} - {*numbers}:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def anew(stream: TextIO) -> TextIO:
    """The stream anew, on the file that has its number now: whether a file can be sought is asked once."""
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
    """Write a command line over this process's own, for `ps` and /proc. One that is too long is cut."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # a /proc that does not say where it is
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
        if start and room > 1:
            ctypes.memmove(start, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main()
