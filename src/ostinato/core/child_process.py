"""A child process that answers lines with lines, both ends: the parent kills it with all that it started, and it ends with its parent.

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

# ---------------------------------------------------------------- the parent's end


class _Protocol(SubprocessStreamProtocol):
    """Ends what the process leaves running as soon as it has ended: later its number may be that of others."""

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
        """Run a module with this interpreter. `longest_line`: of the child's answers, in bytes."""
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
        """What the child writes."""
        assert self.process.stdout is not None
        return self.process.stdout

    async def send(self, lines: Sequence[bytes]) -> None:
        """Write the lines as the pipe has room. That the process is gone is noticed when its answer is awaited."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            for line in lines:
                self.process.stdin.write(line)
                await self.process.stdin.drain()

    async def kill(self) -> None:
        """End the process and all that it started, and wait for it."""
        if self.process.returncode is None:
            _kill_group(self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(OSError):
            await self.process.stdin.wait_closed()
        output = self._transport.get_pipe_transport(1)
        if output is not None:
            output.close()  # a process left running may hold its other end, which the wait below would wait for
        await self.process.wait()


# ---------------------------------------------------------------- the child's end


def take_over() -> tuple[BinaryIO, BinaryIO]:
    """Reserve standard input and output for lines: the program's code gets an empty input, and its output goes to standard error."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return questions, answers


def read_until_end(questions: BinaryIO, take: Callable[[bytes], None]) -> None:
    """Pass on each line; when the input ends, the parent is gone: end this process and all that it started. For a thread of its own."""
    for line in questions:
        take(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
