"""The namespaces backend: starts boxes of Linux namespaces, as many at once as the settings allow; and one-shot runs in such boxes.

A one-shot run is of code that a model wrote, where it can reach nothing: no host files, no network, no other process, no extra time. In
the data flow: the graders (and the demo's simulated users) give `SingleRuns.run` a program and get an `ExecResult`. Every run is a box of
its own (`native/`) with an empty /tmp that vanishes with it; a Python source runs in a warm copy of the zygote's interpreter. Namespaces
share the host's kernel: this holds against the code that models write, not against a kernel exploit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType

from ostinato.core.errors import BadRequest, SandboxRefused, Unavailable
from ostinato.core.sandbox import ExecResult, Isolation, Limits, SandboxSpec
from ostinato.worlds.sandbox import protocol, spec_validation
from ostinato.worlds.sandbox.box import Box, Pipe, Stack
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.host import Zygote
from ostinato.worlds.sandbox.proxy import Proxy, check_hosts

# ---------------------------------------------------------------- boxes


_START_S = 20.0


class Boxes:
    r"""A `Backend` of namespaces on this machine. The zygote starts with the first box; `close` ends everything.
    Without `groups` no control group is made, even where it is possible, and a watch enforces the memory limit; with `gives_way` boxes
    yield the processor to everything else.

    Example::

        boxes = Boxes(SandboxConfig())
        box = await boxes.start(SandboxSpec(files={"a.txt": b"1"}))
        await box.exec(["sh", "-c", "wc -c a.txt"], timeout=5.0)   # stdout == b"1 a.txt\n"
    """

    def __init__(self, config: SandboxConfig | None = None, *, groups: bool = True, gives_way: bool = True) -> None:
        self.config = config or SandboxConfig()
        self._zygote = Zygote(full=True, groups=groups, gives_way=gives_way)
        self._turns = asyncio.Semaphore(self.config.boxes)
        self._open: set[Box] = set()
        self._without_sockets: set[str] = set()  # mounts that were searched for sockets

    async def isolation(self) -> Isolation:
        await self._zygote.opened()
        hello = self._zygote.hello
        return Isolation(
            kind="namespaces", forks=True, counts_memory=bool(hello["memory"]), missing=tuple(hello["missing"])
        )

    async def start(self, spec: SandboxSpec) -> Box:
        spec_validation.check_names(spec.files)
        spec_validation.check_workdir(spec.workdir)
        spec_validation.check_mounts(spec.mounts, spec.workdir)
        spec_validation.check_environment(spec.env)
        check_hosts(spec.hosts)
        if any(not os.path.isabs(layer) for layer in spec.layers):
            raise BadRequest("layers: must be absolute paths of directories", field="layers")
        for source in {os.path.realpath(source) for source in spec.mounts.values()} - self._without_sockets:
            await asyncio.to_thread(spec_validation.check_no_socket, source)
            self._without_sockets.add(source)
        layers = [await self._zygote.layer(layer) for layer in reversed(spec.layers)]
        return await self._started(spec, Stack(own=("f",), layers=tuple(f"h{number}" for number in layers)), ())

    async def _started(self, spec: SandboxSpec, stack: Stack, mounts: Sequence[int]) -> Box:
        await self._turns.acquire()
        try:
            box = await self._start(spec, stack, mounts)
        except BaseException:
            self._turns.release()
            raise
        self._open.add(box)
        box.on_stop += [self._turns.release, lambda: self._open.discard(box)]
        if box.listener is not None:
            proxy = Proxy(box.listener, spec.hosts)
            await proxy.start()
            box.on_stop.append(proxy.close)
        return box

    async def _start(self, spec: SandboxSpec, stack: Stack, mounts: Sequence[int]) -> Box:
        await self._zygote.opened()
        flags = protocol.StartFlag.OVERLAY | protocol.StartFlag.OWN_NET
        flags |= protocol.StartFlag.PROC if self._zygote.hello["proc"] else protocol.StartFlag(0)
        flags |= protocol.StartFlag.BLOB if spec.files else protocol.StartFlag(0)
        flags |= protocol.StartFlag.PROXY if spec.hosts else protocol.StartFlag(0)
        binds = [(f"h{await self._zygote.layer(source)}", place) for place, source in spec.mounts.items()]
        message = spec_validation.pack_start(
            flags,
            spec.limits,
            spec.workdir,
            stack.lowers,
            layers=len(stack.layers),
            mounts=len(mounts),
            binds=binds,
        )
        line = protocol.BoxConnection()
        blobs = (
            [protocol.anonymous_file(await asyncio.to_thread(spec_validation.pack_files, spec.files))]
            if spec.files
            else []
        )
        try:
            numbers = {
                os.path.realpath(layer): int(name[1:])
                for layer, name in zip(reversed(spec.layers), stack.layers, strict=True)
            }
            numbers |= {os.path.realpath(spec.mounts[place]): int(name[1:]) for name, place in binds}
            await self._zygote.start(message, [line.theirs.fileno(), *blobs, *mounts], numbers)
            line.sent()
            async with asyncio.timeout(_START_S):
                ready = await line.ready
        except TimeoutError as error:
            line.close()
            raise Unavailable("the sandbox did not start in time") from error
        except BaseException:
            line.close()
            raise
        finally:
            for fd in blobs:
                os.close(fd)
        env = spec_validation.ENVIRONMENT | (Proxy.VARIABLES if spec.hosts else {}) | dict(spec.env)
        return Box(spec, stack, line, ready, env, self._started)

    async def close(self) -> None:
        boxes = list(self._open)
        await asyncio.gather(*(box.stop() for box in boxes))
        await asyncio.to_thread(self._zygote.close)


# ---------------------------------------------------------------- one-shot runs


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
            blob: spec_validation.pack_start(
                protocol.StartFlag.BLOB if blob else protocol.StartFlag(0),
                limits,
                "/tmp",
                address_space=config.memory_mb << 20,
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
        placed, flags = dict(files or {}), protocol.ExecFlag.LAST
        if isinstance(program, str):
            placed["main.py"] = program.encode("utf-8", "surrogatepass")
            program, flags = ["/tmp/main.py"], flags | protocol.ExecFlag.BODY
        spec_validation.check_names(placed)
        count, text = spec_validation.pack_program(tuple(program), spec_validation.ENVIRONMENT, "")
        async with self._turns:
            for _ in range(2):  # a zygote that was killed is replaced once
                with contextlib.suppress(Unavailable):
                    return await self._exchange(spec_validation.pack_files(placed), flags, count, text, stdin, timeout)
                self.close()
        raise Unavailable("the sandbox's zygote died during two attempts; is something killing it (out of memory)?")

    async def _exchange(
        self, files: bytes, flags: protocol.ExecFlag, count: int, text: bytes, stdin: bytes, timeout: float
    ) -> ExecResult:
        """Do one run. Raises Unavailable if the zygote dies during it or does not answer."""
        cap = self.config.output_bytes
        line, blobs = protocol.BoxConnection(), list[int]()
        out, err = pipes = [Pipe(cap), Pipe(cap)]
        fds = [pipe.write for pipe in pipes]
        try:
            if stdin:
                blobs.append(protocol.anonymous_file(stdin, sealed=True))
                fds, flags = [*fds, blobs[-1]], flags | protocol.ExecFlag.WITH_STDIN
            _, ended = line.ask(protocol.Operation.EXEC, text, flags=flags, count=count, timeout=timeout, fds=fds)
            if files:
                blobs.append(protocol.anonymous_file(files))
            await self._zygote.start(self._start[bool(files)], [line.theirs.fileno(), *blobs[-1:][: bool(files)]])
            line.sent()
            for pipe in pipes:
                pipe.sent()
            async with asyncio.timeout(protocol.LONGEST * timeout + _GRACE_S):
                return await self._result(ended, out, err)
        except TimeoutError as error:
            raise Unavailable("the sandbox does not answer") from error
        finally:
            for fd in blobs:
                os.close(fd)
            for pipe in pipes:
                pipe.close()
            line.close()  # pid 1 of a run that has not ended then ends it

    async def _result(self, ended: asyncio.Future[protocol.BoxReply], out: Pipe, err: Pipe) -> ExecResult:
        waiting = {ended, out.ended, err.ended}
        while not ended.done() and not (out.flooded or err.flooded):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            answer = ended.result()
            if answer.operation == protocol.Operation.REFUSED:
                raise protocol.refusal(answer.text, os.strerror(answer.code))
            stdout, stderr = out.take_rest(), err.take_rest()
            code, reason, seconds = answer.code, protocol.REASONS[answer.reason], answer.seconds
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
