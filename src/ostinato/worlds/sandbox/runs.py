"""One-shot runs of code that a model wrote, where it can reach nothing: no host files, no network, no other process, no extra time.

In the data flow: the graders (and the demo's simulated users) give `SingleRuns.run` a program and get an `ExecResult`. Every run is a
box of its own (`native/`) with an empty /tmp that vanishes with it; a Python source runs in a warm copy of the zygote's interpreter.
Namespaces share the host's kernel: this holds against the code that models write, not against a kernel exploit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType

from ostinato.core.errors import SandboxRefused, Unavailable
from ostinato.core.sandbox import ExecResult, Limits
from ostinato.worlds.sandbox.box import Pipe
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.host import Zygote
from ostinato.worlds.sandbox.protocol import (
    LONGEST,
    REASONS,
    BoxConnection,
    BoxReply,
    ExecFlag,
    Operation,
    StartFlag,
    anonymous_file,
    refusal,
)
from ostinato.worlds.sandbox.spec_validation import ENVIRONMENT, check_names, pack_files, pack_program, pack_start

_GRACE_S = 10.0  # beyond a run's longest deadline, before the zygote itself is taken for dead


class SingleRuns:
    r"""Isolated runs of untrusted programs. An async context manager; the zygote starts with the first run.

    Example::

        async with SingleRuns(SandboxConfig()) as sandbox:
            result = await sandbox.run("print(6 * 7)", timeout=2.0)   # result.stdout == b"42\n"

    Callers wait for these runs, so they get a usual share of the processor, unless `gives_way` yields it to everything else.

    Raises SandboxRefused where the kernel cannot isolate; there is no mode without isolation.
    """

    def __init__(self, config: SandboxConfig | None = None, *, gives_way: bool = False) -> None:
        self.config = config or SandboxConfig()
        self._turns = asyncio.Semaphore(self.config.concurrency)
        self._zygote = Zygote(full=False, gives_way=gives_way)
        config = self.config
        limits = Limits(
            memory_mb=config.memory_mb, disk_mb=config.disk_mb, processes=config.processes, open_files=config.open_files
        )
        self._start = {
            blob: pack_start(
                StartFlag.BLOB if blob else StartFlag(0), limits, "/tmp", address_space=config.memory_mb << 20
            )
            for blob in (False, True)
        }

    async def __aenter__(self) -> SingleRuns:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _process(self) -> subprocess.Popen[bytes] | None:
        return self._zygote.process

    def close(self) -> None:
        """End the zygote and every run. A later run starts a new one."""
        self._zygote.close()

    async def check(self) -> None:
        """Raise SandboxRefused unless a run works here, with the step that failed and how to enable it."""
        result = await self.run("print(6 * 7)", timeout=20.0)
        if result.stdout != b"42\n":
            raise SandboxRefused(
                f"the sandbox started but Python did not run in it (exit {result.code}): {result.stderr[-500:]!r}"
            )

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        timeout: float,
    ) -> ExecResult:
        """Run Python source, or an argv with an absolute path, in a fresh sandbox whose working directory is /tmp.

        Args:
            program: Python source text (run as ``__main__`` by a warm interpreter of this version), or an argv.
            files: relative name -> bytes, placed in the working directory before the start.
            stdin: what the program reads.
            timeout: seconds until everything is killed; `Sandbox.exec` says what does not count.

        Raises:
            BadRequest: a file name that leaves the working directory.
            SandboxRefused: the kernel or container refused a step of the isolation.
            Unavailable: the zygote died twice in a row.
        """
        placed, flags = dict(files or {}), ExecFlag.LAST
        if isinstance(program, str):
            placed["main.py"] = program.encode("utf-8", "surrogatepass")
            program, flags = ["/tmp/main.py"], flags | ExecFlag.BODY
        check_names(placed)
        count, text = pack_program(tuple(program), ENVIRONMENT, "")
        async with self._turns:
            for _ in range(2):  # a zygote that was killed is replaced once
                with contextlib.suppress(Unavailable):
                    return await self._exchange(pack_files(placed), flags, count, text, stdin, timeout)
                self.close()
        raise Unavailable("the sandbox's zygote died during two attempts; is something killing it (out of memory)?")

    async def _exchange(
        self, files: bytes, flags: ExecFlag, count: int, text: bytes, stdin: bytes, timeout: float
    ) -> ExecResult:
        """Do one run. Raises Unavailable if the zygote dies during it or does not answer."""
        cap = self.config.output_bytes
        line, blobs = BoxConnection(), list[int]()
        out, err = pipes = [Pipe(cap), Pipe(cap)]
        fds = [pipe.write for pipe in pipes]
        try:
            if stdin:
                blobs.append(anonymous_file(stdin, sealed=True))
                fds, flags = [*fds, blobs[-1]], flags | ExecFlag.WITH_STDIN
            _, ended = line.ask(Operation.EXEC, text, flags=flags, count=count, timeout=timeout, fds=fds)
            if files:
                blobs.append(anonymous_file(files))
            await self._zygote.start(self._start[bool(files)], [line.theirs.fileno(), *blobs[-1:][: bool(files)]])
            line.sent()
            for pipe in pipes:
                pipe.sent()
            async with asyncio.timeout(LONGEST * timeout + _GRACE_S):
                return await self._result(ended, out, err)
        except TimeoutError as error:
            raise Unavailable("the sandbox does not answer") from error
        finally:
            for fd in blobs:
                os.close(fd)
            for pipe in pipes:
                pipe.close()
            line.close()  # pid 1 of a run that has not ended then ends it

    async def _result(self, ended: asyncio.Future[BoxReply], out: Pipe, err: Pipe) -> ExecResult:
        waiting = {ended, out.ended, err.ended}
        while not ended.done() and not (out.flooded or err.flooded):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            answer = ended.result()
            if answer.operation == Operation.REFUSED:
                raise refusal(answer.text, os.strerror(answer.code))
            stdout, stderr = out.take_rest(), err.take_rest()
            code, reason, seconds = answer.code, REASONS[answer.reason], answer.seconds
        else:
            stdout, stderr, code, reason, seconds = out.take_rest(), err.take_rest(), -9, None, float("nan")
        if out.flooded or err.flooded:
            code, reason = -9, "output"
        return ExecResult(
            code=code,
            stdout=stdout,
            stderr=stderr,
            timed_out=reason == "timeout",
            killed_reason=reason,
            seconds=seconds,
        )
