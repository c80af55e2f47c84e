"""The `namespaces` backend: stateful sandboxes ("boxes") made of Linux namespaces (`Boxes`), and one-shot runs (`SingleRuns`).

A single run executes one model-written program without access to host files, the network or other processes, and within a time limit.
The graders and the demo's simulated users pass `SingleRuns.run` a program and get an `ExecResult`. Every run gets its own box (`native/`)
with an empty /tmp, which is deleted with the box. Python source runs in a fork of the zygote's warm interpreter. Boxes share the host's
kernel: they contain the code that models write, but do not withstand a kernel exploit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from ostinato.core.errors import BadRequest, SandboxRefused, TooLarge, Unavailable
from ostinato.core.sandbox import Change, ChangeKind, ExecResult, Isolation, Limits, SandboxSpec
from ostinato.worlds.sandbox import protocol, spec_validation
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.host import Zygote
from ostinato.worlds.sandbox.inside.compare import HEAD
from ostinato.worlds.sandbox.proxy import OpenSandboxes, environment_of

# ---------------------------------------------------------------- a program and its output


class Pipe:
    """A pipe whose read end is drained into memory, up to `cap` bytes.

    The future `ended` resolves to True at end of file, or to False as soon as the output exceeds `cap`.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.data = b""
        self.read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read, False)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[bool] = self._loop.create_future()
        self._open = True
        self._loop.add_reader(self.read, self._drain)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self.read, 65536)
            self.data += part[: self.cap + 1 - len(self.data)]
            if not part:
                self.close()
            elif len(self.data) > self.cap and not self.ended.done():
                self.ended.set_result(False)

    @property
    def flooded(self) -> bool:
        """True if the output exceeded `cap`."""
        return len(self.data) > self.cap

    def close_write_end(self) -> None:
        """Close our copy of the write end, after it was passed to the other process."""
        os.close(self.write)
        self.write = -1

    def take_rest(self) -> bytes:
        """Read what the pipe holds now and return all output so far. Later output of a background program is drained and discarded."""
        while self._open and not self.flooded:
            before = len(self.data)
            self._drain()
            if len(self.data) == before:
                break
        return self.data[: self.cap]

    def close(self) -> None:
        """Stop reading and close both ends. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self.read)
            os.close(self.read)
            if self.write >= 0:
                os.close(self.write)
            if not self.ended.done():
                self.ended.set_result(True)


_GRACE_S = 20.0  # a box that has not answered this long after a program's latest deadline counts as dead


class ProgramRun:
    """A program running in a box. Creating one sends the request to the box.

    `program` comes from `pack_program`; the program may run for `timeout` seconds and print `cap` bytes to each of stdout and stderr.
    Raises Unavailable if the box is gone.
    """

    def __init__(
        self,
        line: protocol.BoxConnection,
        program: tuple[int, bytes],
        *,
        stdin: bytes,
        timeout: float,
        cap: int,
        flags: int = 0,
    ) -> None:
        self._line, self._timeout = line, timeout
        self.pipes = (Pipe(cap), Pipe(cap))
        fds = [pipe.write for pipe in self.pipes]
        try:
            if stdin:
                fds.append(protocol.anonymous_file(stdin, sealed=True))
                flags |= protocol.ExecFlag.WITH_STDIN
            count, text = program
            self._number, self._ended = line.ask(
                protocol.Operation.EXEC, text, flags=flags, count=count, timeout=timeout, fds=fds
            )
            for pipe in self.pipes:
                pipe.close_write_end()
        except BaseException:
            for pipe in self.pipes:
                pipe.close()
            raise
        finally:
            for fd in fds[2:]:
                os.close(fd)

    @property
    def flooded(self) -> bool:
        """True if stdout or stderr exceeded its limit."""
        return any(pipe.flooded for pipe in self.pipes)

    async def wait(self, grace: float = _GRACE_S) -> protocol.BoxReply:
        """Wait for the program to end and return pid 1's answer. Kill the program if it prints too much.

        Raises Unavailable if there is no answer `grace` seconds after the latest possible deadline, or if the box is gone.
        """
        waiting = {self._ended, *(pipe.ended for pipe in self.pipes)}
        try:
            async with asyncio.timeout(protocol.MAX_DEADLINE_FACTOR * self._timeout + grace):
                while not self._ended.done():
                    _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if self.flooded:
                        self._line.end(self._number)
        except TimeoutError as error:
            raise Unavailable("the sandbox does not answer") from error
        finally:
            if not self._ended.done():
                self._line.end(self._number)
        return self._ended.result()

    def result(self, answer: protocol.BoxReply) -> ExecResult:
        """Combine pid 1's answer and the collected output into an `ExecResult`."""
        stdout, stderr = (pipe.take_rest() for pipe in self.pipes)
        reason = "output" if self.flooded else protocol.REASONS[answer.reason]
        return ExecResult(
            code=-9 if self.flooded else answer.code,
            stdout=stdout,
            stderr=stderr,
            timed_out=reason == "timeout",
            killed_reason=reason,
            seconds=answer.seconds,
        )


# ---------------------------------------------------------------- the box


_FREEZE_ATTEMPTS, _FREEZE_RETRY_S = 40, 0.05
_KINDS = (ChangeKind.WRITTEN, ChangeKind.DELETED, ChangeKind.LINK, ChangeKind.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The read-only overlay layers below a box's writable layer, topmost first.

    A layer's name is a directory of the box's stage ("l0"), a directory of an ancestor's stage ("a0/l1", where a0 is the first inherited
    mount), or a directory of the host by its zygote number ("h3").

    Example: ``Stack(own=("l0", "f"), inherited=(), layers=("h3",), ancestors=0)``
    """

    own: tuple[str, ...]
    inherited: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    ancestors: int = 0

    def child(self) -> Stack:
        """Return the stack of a fork, in which this box's stage is the last ancestor."""
        passed = tuple(f"a{self.ancestors}/{name}" for name in self.own)
        return Stack(own=("f",), inherited=(*passed, *self.inherited), layers=self.layers, ancestors=self.ancestors + 1)

    @property
    def lowers(self) -> tuple[str, ...]:
        """All layers, topmost first, as overlayfs orders its lower directories."""
        return (*self.own, *self.inherited, *self.layers)


Starter = Callable[[SandboxSpec, Stack, Sequence[int]], Coroutine[Any, Any, "Box"]]


class Box:
    """A `Sandbox` made of Linux namespaces. Created by `Boxes.start` and `fork`."""

    def __init__(
        self,
        spec: SandboxSpec,
        stack: Stack,
        line: protocol.BoxConnection,
        ready: protocol.BoxReply,
        env: Mapping[str, str],
        starter: Starter,
    ) -> None:
        self.spec = spec
        self._stack, self._line, self._env, self._starter = stack, line, dict(env), starter
        self._handle = ready.fds[0] if ready.fds else -1
        self._frozen = 0
        self._changing = asyncio.Lock()
        self._lingering: list[Pipe] = []
        self.on_stop: list[Callable[[], object]] = []

    async def _request(
        self, operation: protocol.Operation, text: str = "", *, count: int = 0, fds: Sequence[int] = ()
    ) -> protocol.BoxReply:
        """Send a request that runs no program, and return the answer. Raises Unavailable."""
        _, answer = self._line.ask(operation, os.fsencode(text) + b"\0", count=count, timeout=_GRACE_S, fds=fds)
        try:
            async with asyncio.timeout(_GRACE_S):
                return await answer
        except TimeoutError as error:
            raise Unavailable("the sandbox does not answer") from error

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float,
    ) -> ExecResult:
        program = spec_validation.pack_program(tuple(argv), {**self._env, **(env or {})}, cwd)
        run = ProgramRun(self._line, program, stdin=stdin, timeout=timeout, cap=self.spec.limits.output_bytes)
        try:
            answer = await run.wait()
            if answer.operation == protocol.Operation.REFUSED:
                raise Unavailable(f"the sandbox could not start the program: {os.strerror(answer.code)}")
            return run.result(answer)
        finally:
            self._keep_draining(run.pipes)

    def _keep_draining(self, pipes: Sequence[Pipe]) -> None:
        """Keep draining pipes that a background program still holds, so that it is not killed by SIGPIPE. Close the others."""
        self._lingering = [pipe for pipe in self._lingering if not (pipe.ended.done() and pipe.ended.result())]
        for pipe in pipes:
            if not self._line.open:
                pipe.close()
            elif not (pipe.ended.done() and pipe.ended.result()):
                pipe.take_rest()
                self._lingering.append(pipe)

    async def read(self, path: str, *, most: int = 1 << 20) -> bytes:
        answer = await self._request(protocol.Operation.READ, spec_validation.inside_workdir(path, self.spec.workdir))
        spec_validation.check_read(path, answer.code or (0 if answer.fds else errno.EIO))
        try:
            return await asyncio.to_thread(_read_all, answer.fds[0], path, most)
        finally:
            os.close(answer.fds[0])

    async def write(self, path: str, data: bytes) -> None:
        name = spec_validation.inside_workdir(path, self.spec.workdir)
        file = protocol.anonymous_file(data)
        try:
            answer = await self._request(protocol.Operation.WRITE, name, fds=[file])
        finally:
            os.close(file)
        spec_validation.check_written(path, answer.code, self.spec.limits)

    async def fork(self, count: int) -> Sequence[Box]:
        if not 1 <= count <= 4000:
            raise BadRequest(f"count: {count} must lie in 1 to 4000", field="count")
        passed: list[int] = []
        try:
            async with self._changing:
                await self._freeze()
                names = [f"a{place}" for place in range(self._stack.ancestors)] + ["."]
                mounts: list[tuple[int, ...]] = []
                for at in range(0, count, protocol.MAX_FDS // 2):
                    part = min(count - at, protocol.MAX_FDS // 2)
                    columns: list[tuple[int, ...]] = []
                    for name in names:
                        column = await self._request(protocol.Operation.CLONES, name, count=part)
                        passed += column.fds
                        if column.code:
                            raise Unavailable("the sandbox's layers cannot be passed on")
                        columns.append(column.fds)
                    mounts += zip(*columns, strict=True)
                stack = self._stack.child()
            return await self._start_all(stack, mounts)
        finally:
            for fd in passed:
                os.close(fd)

    async def _freeze(self) -> None:
        """Turn the box's writable layer into a read-only one, on which forks can be stacked. Raises Unavailable."""
        answer = await self._request(protocol.Operation.FREEZE)
        for _ in range(_FREEZE_ATTEMPTS):
            if answer.code != errno.EBUSY:
                break
            await asyncio.sleep(_FREEZE_RETRY_S)  # a killed program holds its directory until it has exited
            answer = await self._request(protocol.Operation.FREEZE)
        if answer.code == errno.EBUSY:
            raise Unavailable(
                "a program that runs in the sandbox has the working directory as its current directory: end it before the fork"
            )
        if answer.code:
            raise Unavailable(f"the sandbox cannot be frozen: {os.strerror(answer.code)}")
        self._stack = replace(self._stack, own=(f"l{self._frozen}", *self._stack.own))
        self._frozen += 1

    async def _start_all(self, stack: Stack, mounts: Sequence[tuple[int, ...]]) -> list[Box]:
        spec = replace(self.spec, files={})
        starting = [asyncio.ensure_future(self._starter(spec, stack, fds)) for fds in mounts]
        try:
            return list(await asyncio.gather(*starting))
        except BaseException:  # also on cancellation: nobody would stop the boxes that have started
            for start in starting:
                start.cancel()
            ended = await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(box.stop() for box in ended if isinstance(box, Box)))
            raise

    async def diff(self) -> Sequence[Change]:
        out = protocol.anonymous_file(b"")
        try:
            answer = await self._request(protocol.Operation.DIFF, fds=[out])
            if answer.operation != protocol.Operation.DIFF or answer.code:
                raise Unavailable(f"the sandbox's files could not be compared (exit {answer.code})")
            return await asyncio.to_thread(lambda: read_changes(os.pread(out, os.fstat(out).st_size, 0)))
        finally:
            os.close(out)

    async def listen(self, port: int) -> socket.socket:
        spec_validation.check_port(port)
        answer = await self._request(protocol.Operation.LISTEN, count=port)
        if answer.code or not answer.fds:
            raise Unavailable(f"port {port} of the sandbox cannot be opened: {os.strerror(answer.code or errno.EIO)}")
        listener = socket.socket(fileno=answer.fds[0])
        listener.setblocking(False)
        return listener

    async def stop(self) -> None:
        try:
            if self._line.open:
                with contextlib.suppress(Unavailable, TimeoutError):
                    _, answer = self._line.ask(protocol.Operation.STOP)
                    async with asyncio.timeout(5.0):
                        await answer
        finally:  # also on cancellation
            self.release()

    def release(self) -> None:
        """Close the connection and kill the box. Idempotent."""
        self._line.close()
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = -1
        for pipe in self._lingering:
            pipe.close()
        self._lingering = []
        for call in self.on_stop:
            call()
        self.on_stop = []


def _read_all(fd: int, path: str, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size <= most and (part := os.pread(fd, min(1 << 20, most + 1 - size), size)):
        parts.append(part)
        size += len(part)
    if size > most:
        raise TooLarge(f"path: {path!r} has more than {most} bytes", field="path")
    return b"".join(parts)


def read_changes(data: bytes) -> list[Change]:
    """Parse the change records that inside/compare.py writes."""
    changes: list[Change] = []
    at = 0
    while at < len(data):
        kind, executable, _, name, size = HEAD.unpack_from(data, at)
        at += HEAD.size
        path, content = os.fsdecode(data[at : at + name]), data[at + name : at + name + size]
        at += name + size
        changes.append(Change(path=path, kind=_KINDS[kind], data=content, executable=bool(executable)))
    return changes


# ---------------------------------------------------------------- boxes


_START_S = 20.0


class Boxes:
    r"""A sandbox `Backend` that uses Linux namespaces on this machine. The zygote starts with the first box; `close` ends everything.

    Without `groups` no control groups are created, even where they are permitted, and a poller enforces the memory limit. With
    `gives_way` boxes yield the processor to everything else on the machine.

    Example::

        boxes = Boxes(SandboxConfig())
        box = await boxes.start(SandboxSpec(files={"a.txt": b"1"}))
        await box.exec(["sh", "-c", "wc -c a.txt"], timeout=5.0)   # stdout == b"1 a.txt\n"
    """

    def __init__(self, config: SandboxConfig | None = None, *, groups: bool = True, gives_way: bool = True) -> None:
        self.config = config or SandboxConfig()
        self._zygote = Zygote(full=True, groups=groups, gives_way=gives_way)
        self._sandboxes = OpenSandboxes[Box](self.config.boxes)
        self._without_sockets: set[str] = set()  # mount sources already checked for sockets

    async def isolation(self) -> Isolation:
        await self._zygote.ensure_started()
        hello = self._zygote.hello
        return Isolation(
            kind="namespaces", forks=True, counts_memory=bool(hello["memory"]), missing=tuple(hello["missing"])
        )

    async def start(self, spec: SandboxSpec) -> Box:
        spec_validation.check_spec(spec)
        for source in {os.path.realpath(source) for source in spec.mounts.values()} - self._without_sockets:
            await asyncio.to_thread(spec_validation.check_no_socket, source)
            self._without_sockets.add(source)
        layers = [await self._zygote.layer("layers", layer) for layer in reversed(spec.layers)]
        return await self._started(spec, Stack(own=("f",), layers=tuple(f"h{number}" for number in layers)), ())

    async def _started(self, spec: SandboxSpec, stack: Stack, mounts: Sequence[int]) -> Box:
        return await self._sandboxes.start(lambda: self._start(spec, stack, mounts), spec.hosts)

    async def _start(self, spec: SandboxSpec, stack: Stack, mounts: Sequence[int]) -> Box:
        await self._zygote.ensure_started()
        flags = protocol.StartFlag.OVERLAY | protocol.StartFlag.OWN_NET
        flags |= protocol.StartFlag.PROC if self._zygote.hello["proc"] else protocol.StartFlag(0)
        flags |= protocol.StartFlag.BLOB if spec.files else protocol.StartFlag(0)
        binds = [(f"h{await self._zygote.layer('mounts', source)}", place) for place, source in spec.mounts.items()]
        message = spec_validation.pack_start(
            flags, spec.limits, spec.workdir, stack.lowers, layers=len(stack.layers), mounts=len(mounts), binds=binds
        )
        shown = [*zip(stack.layers, reversed(spec.layers), strict=True)]
        shown += [(name, spec.mounts[place]) for name, place in binds]
        numbers = {os.path.realpath(source): int(name[1:]) for name, source in shown}
        blobs = list[int]()
        if spec.files:
            blobs.append(protocol.anonymous_file(await asyncio.to_thread(spec_validation.pack_files, spec.files)))
        line = protocol.BoxConnection()
        try:
            await self._zygote.start(message, [line.peer.fileno(), *blobs, *mounts], numbers)
            line.close_peer()
            async with asyncio.timeout(_START_S):
                ready = await line.ready
        except BaseException as error:
            line.close()
            if isinstance(error, TimeoutError):
                raise Unavailable("the sandbox did not start in time") from error
            raise
        finally:
            for fd in blobs:
                os.close(fd)
        return Box(spec, stack, line, ready, environment_of(spec), self._started)

    async def close(self) -> None:
        await self._sandboxes.close()
        await asyncio.to_thread(self._zygote.close)


# ---------------------------------------------------------------- single runs


_ZYGOTE_GRACE_S = 10.0  # a zygote that has not answered this long after a run's latest deadline counts as dead


class SingleRuns:
    r"""One-shot isolated runs of untrusted programs. An async context manager; the zygote starts with the first run.

    Example::

        async with SingleRuns(SandboxConfig()) as sandbox:
            result = await sandbox.run("print(6 * 7)", timeout=2.0)   # result.stdout == b"42\n"

    Callers wait for these runs, so they get an ordinary share of the processor, unless `gives_way` yields it to everything else.

    `run` raises SandboxRefused if the kernel cannot isolate; there is no mode without isolation.
    """

    def __init__(self, config: SandboxConfig | None = None, *, gives_way: bool = False) -> None:
        self.config = config or SandboxConfig()
        self._turns = asyncio.Semaphore(self.config.concurrency)
        self._zygote = Zygote(full=False, gives_way=gives_way)
        self._answered = 0  # runs completed so far
        config = self.config
        limits = Limits(
            memory_mb=config.memory_mb, disk_mb=config.disk_mb, processes=config.processes, open_files=config.open_files
        )
        flags, space = (protocol.StartFlag(0), protocol.StartFlag.BLOB), config.memory_mb << 20
        self._start = [spec_validation.pack_start(each, limits, "/tmp", address_space=space) for each in flags]

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
        """End the zygote and every run. A later run starts a new zygote."""
        self._zygote.close()

    async def check(self) -> None:
        """Raise SandboxRefused unless a run works on this machine. The error names the step that failed and how to permit it."""
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

        A warm interpreter of this Python version runs source as ``__main__``. `files` (relative name -> bytes) are written to the working
        directory first. After `timeout` seconds everything is killed; `Sandbox.exec` says which time does not count.

        Raises BadRequest for a file name outside the working directory, SandboxRefused, and Unavailable if the zygote died twice in a row.
        """
        placed, flags = dict(files or {}), protocol.ExecFlag.LAST
        if isinstance(program, str):
            placed["main.py"] = program.encode("utf-8", "surrogatepass")
            program, flags = ["/tmp/main.py"], flags | protocol.ExecFlag.BODY
        spec_validation.check_names(placed)
        packed = spec_validation.pack_program(tuple(program), spec_validation.ENVIRONMENT, "")
        async with self._turns:
            for _ in range(2):  # replace a killed zygote once
                answered = self._answered
                with contextlib.suppress(Unavailable):
                    return await self._exchange(spec_validation.pack_files(placed), flags, packed, stdin, timeout)
                if answered == self._answered:  # a zygote that answered other runs is alive: ending it would end them
                    self.close()
        raise Unavailable("the sandbox's zygote died during two attempts; is something killing it (out of memory)?")

    async def _exchange(
        self, files: bytes, flags: protocol.ExecFlag, program: tuple[int, bytes], stdin: bytes, timeout: float
    ) -> ExecResult:
        """Do one run. Raises Unavailable if the zygote dies or does not answer."""
        with contextlib.ExitStack() as cleanup:
            line = protocol.BoxConnection()
            cleanup.callback(line.close)  # makes pid 1 end a run that is still going
            run = ProgramRun(line, program, stdin=stdin, timeout=timeout, cap=self.config.output_bytes, flags=flags)
            for pipe in run.pipes:
                cleanup.callback(pipe.close)
            fds = [line.peer.fileno()]
            if files:
                fds.append(protocol.anonymous_file(files))
                cleanup.callback(os.close, fds[1])
            await self._zygote.start(self._start[bool(files)], fds)
            line.close_peer()
            began = asyncio.get_running_loop().time()
            try:
                answer = await run.wait(_ZYGOTE_GRACE_S)
            except Unavailable:
                if not run.flooded:
                    raise
                # no answer could change this result, and a retry might end all other runs with the zygote
                took = asyncio.get_running_loop().time() - began
                answer = protocol.BoxReply(
                    operation=protocol.Operation.EXEC, code=-9, reason=0, seconds=took, text="", fds=()
                )
            else:
                self._answered += 1
            if answer.operation == protocol.Operation.REFUSED:
                raise protocol.refusal(answer.text, os.strerror(answer.code))
            return run.result(answer)
