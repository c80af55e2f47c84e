"""A child process with a line protocol, both ends. The parent kills it with all its children, and it exits with its parent.

For an operator's own functions, which may hang, exit, print or use up memory. The child's program is a module with a `main`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Callable, Sequence
from typing import BinaryIO, Self, cast

# ---------------------------------------------------------------- parent


class _Protocol(SubprocessStreamProtocol):
    """Kills the process group as soon as the process has exited: later its id may be reused."""

    _pid: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pid = cast("asyncio.SubprocessTransport", transport).get_pid()
        super().connection_made(transport)

    def process_exited(self) -> None:
        if self._pid is not None:
            _kill_group(self._pid)
        super().process_exited()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class ChildProcess:
    """A running child, in a session of its own.

    Example: ``child = await ChildProcess.start("ostinato.reward.child", longest_line=1 << 20)``
    """

    def __init__(self, process: Process, transport: asyncio.SubprocessTransport) -> None:
        self.process = process
        self._transport = transport

    @classmethod
    async def start(cls, module: str, *, longest_line: int) -> Self:
        """Run a module with this interpreter. `longest_line`: most bytes of a line of the child's answers."""
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: _Protocol(limit=longest_line, loop=loop),
            *(sys.executable, "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            stderr=None,
            start_new_session=True,
        )
        return cls(Process(transport, protocol, loop), transport)

    @property
    def answers(self) -> asyncio.StreamReader:
        """The child's output."""
        assert self.process.stdout is not None
        return self.process.stdout

    async def send(self, lines: Sequence[bytes]) -> None:
        """Write the lines as the pipe has room. A process that is gone is noticed when its answer is awaited."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            for line in lines:
                self.process.stdin.write(line)
                await self.process.stdin.drain()

    async def kill(self) -> None:
        """Kill the process and all its children, and wait for it."""
        if self.process.returncode is None:
            _kill_group(self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(OSError):
            await self.process.stdin.wait_closed()
        output = self._transport.get_pipe_transport(1)
        if output is not None:
            output.close()  # a surviving process may hold its other end, which would block the wait below
        await self.process.wait()


# ---------------------------------------------------------------- child


def take_over() -> tuple[BinaryIO, BinaryIO]:
    """Reserve standard input and output for the protocol: the program's code gets an empty input, and its output goes to standard error."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return questions, answers


def read_until_end(questions: BinaryIO, take: Callable[[bytes], None]) -> None:
    """Pass on each line. When the input ends, the parent is gone: kill this process and all its children. Run it in its own thread."""
    for line in questions:
        take(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
