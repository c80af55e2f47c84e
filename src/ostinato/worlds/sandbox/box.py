"""The host's side of one stateful sandbox: programs, their output, files, forks, changes. The sandbox's side is `native/`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostinato.core.errors import BadRequest, NotFound, StorageFull, TooLarge, Unavailable
from ostinato.core.sandbox import Change, ChangeKind, ExecResult, SandboxSpec
from ostinato.worlds.sandbox import protocol
from ostinato.worlds.sandbox.spec_validation import check_cwd, check_environment, inside_workdir, pack_program

# ---------------------------------------------------------------- pipes


class Pipe:
    """The read end of a pipe, drained into memory up to `cap` bytes.

    `ended` becomes True at the end of the output, or False as soon as there is more than `cap`.
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
        """True if there was more than the limit."""
        return len(self.data) > self.cap

    def sent(self) -> None:
        """Close our copy of the write end, which the other process now has."""
        os.close(self.write)
        self.write = -1

    def take_rest(self) -> bytes:
        """All output up to now. A background program may go on printing, but that is read and discarded."""
        while self._open and not self.flooded:
            before = len(self.data)
            self._drain()
            if len(self.data) == before:
                break
        return self.data[: self.cap]

    def close(self) -> None:
        """Stop reading."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self.read)
            os.close(self.read)
            if self.write >= 0:
                os.close(self.write)
            if not self.ended.done():
                self.ended.set_result(True)


# ---------------------------------------------------------------- the box


_GRACE_S = 20.0  # beyond a program's longest deadline, before the box itself is taken for dead
_FREEZE_TRIES, _FREEZE_AGAIN_S = 40, 0.05
_KINDS = (ChangeKind.WRITTEN, ChangeKind.DELETED, ChangeKind.LINK, ChangeKind.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The layers below a box's own layer, topmost first. A name is a directory of the box's stage, of an ancestor's stage ("a0/l1", where
    a0 is the first mount that was passed on), or a layer of the host ("h3").

    Example: ``Stack(own=("l0", "f"), inherited=(), layers=("h3",), ancestors=0)``
    """

    own: tuple[str, ...]
    inherited: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    ancestors: int = 0

    def frozen(self, number: int) -> Stack:
        """The stack after the box's own layer was frozen under this number."""
        return Stack(
            own=(f"l{number}", *self.own), inherited=self.inherited, layers=self.layers, ancestors=self.ancestors
        )

    def child(self) -> Stack:
        """The stack that a fork starts from: this box's stage becomes the last of its ancestors."""
        passed = tuple(f"a{self.ancestors}/{name}" for name in self.own)
        return Stack(own=("f",), inherited=(*passed, *self.inherited), layers=self.layers, ancestors=self.ancestors + 1)

    @property
    def lowers(self) -> tuple[str, ...]:
        """All layers, topmost first."""
        return (*self.own, *self.inherited, *self.layers)


Starter = Callable[[SandboxSpec, Stack, Sequence[int]], Coroutine[Any, Any, "Box"]]


class Box:
    """A `Sandbox` of namespaces. Made by `Boxes.start` and `fork`."""

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
        self.listener = socket.socket(fileno=ready.fds[1]) if len(ready.fds) > 1 else None
        self._frozen = 0
        self._running = 0
        self._changing = asyncio.Lock()
        self._lingering: list[Pipe] = []
        self.on_stop: list[Callable[[], None]] = []

    async def _asked(
        self, operation: protocol.Operation, text: str = "", *, count: int = 0, fds: Sequence[int] = ()
    ) -> protocol.BoxReply:
        """Send a request that runs no program and wait for its answer. Raises Unavailable."""
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
        check_cwd(cwd)
        check_environment(env or {})
        count, text = pack_program(tuple(argv), {**self._env, **(env or {})}, cwd or "")
        cap = self.spec.limits.output_bytes
        pipes = [Pipe(cap), Pipe(cap)]
        fds, flags, inputs = [pipe.write for pipe in pipes], protocol.ExecFlag(0), list[int]()
        if stdin:
            inputs.append(protocol.anonymous_file(stdin, sealed=True))
            flags |= protocol.ExecFlag.WITH_STDIN
        try:
            number, ended = self._line.ask(
                protocol.Operation.EXEC, text, flags=flags, count=count, timeout=timeout, fds=[*fds, *inputs]
            )
            for pipe in pipes:
                pipe.sent()
            return await self._result(number, ended, pipes[0], pipes[1], timeout)
        finally:
            for fd in inputs:
                os.close(fd)
            self._let_go(pipes)

    async def _result(
        self, number: int, ended: asyncio.Future[protocol.BoxReply], out: Pipe, err: Pipe, timeout: float
    ) -> ExecResult:
        waiting = {ended, out.ended, err.ended}
        flooded = False
        try:
            async with asyncio.timeout(protocol.LONGEST * timeout + _GRACE_S):
                while not ended.done():
                    _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if (out.flooded or err.flooded) and not flooded:
                        flooded = True
                        self._line.end(number)
        except TimeoutError as error:
            raise Unavailable("the sandbox does not answer") from error
        finally:
            if not ended.done():
                self._line.end(number)
        answer = ended.result()
        if answer.operation == protocol.Operation.REFUSED:
            raise Unavailable(f"the sandbox could not start the program: {os.strerror(answer.code)}")
        stdout, stderr = out.take_rest(), err.take_rest()
        flooded = flooded or out.flooded or err.flooded
        reason = "output" if flooded else protocol.REASONS[answer.reason]
        return ExecResult(
            code=-9 if flooded else answer.code,
            stdout=stdout,
            stderr=stderr,
            timed_out=reason == "timeout",
            killed_reason=reason,
            seconds=answer.seconds,
        )

    def _let_go(self, pipes: Sequence[Pipe]) -> None:
        """Keep reading pipes that a background program still holds, so that printing does not end it. Close the others."""
        self._lingering = [pipe for pipe in self._lingering if not (pipe.ended.done() and pipe.ended.result())]
        for pipe in pipes:
            if pipe.write >= 0 or not self._line.open:
                pipe.close()
            elif not (pipe.ended.done() and pipe.ended.result()):
                pipe.take_rest()
                self._lingering.append(pipe)

    async def read(self, path: str, *, most: int = 1 << 20) -> bytes:
        answer = await self._asked(protocol.Operation.READ, inside_workdir(path, self.spec.workdir))
        if answer.code in (errno.EXDEV, errno.ELOOP, errno.EACCES):
            raise NotFound(f"path: {path!r} leads out of the working directory", field="path")
        if answer.code or not answer.fds:
            raise NotFound(f"path: {path!r} cannot be read: {os.strerror(answer.code or errno.EIO)}", field="path")
        try:
            return await asyncio.to_thread(_read_all, answer.fds[0], path, most)
        finally:
            os.close(answer.fds[0])

    async def write(self, path: str, data: bytes) -> None:
        name = inside_workdir(path, self.spec.workdir)
        file = protocol.anonymous_file(data)
        try:
            answer = await self._asked(protocol.Operation.WRITE, name, fds=[file])
        finally:
            os.close(file)
        if answer.code in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"the sandbox's {self.spec.limits.disk_mb} MiB do not hold {path!r} as well")
        if answer.code:
            raise BadRequest(f"path: {path!r} cannot be written: {os.strerror(answer.code)}", field="path")

    async def fork(self, count: int) -> Sequence[Box]:
        if not 1 <= count <= 4000:
            raise BadRequest(f"count: {count} must lie in 1 to 4000", field="count")
        mounts: list[tuple[int, ...]] = []
        async with self._changing:
            answer = await self._asked(protocol.Operation.FREEZE)
            for _ in range(_FREEZE_TRIES):
                if answer.code != errno.EBUSY:
                    break
                await asyncio.sleep(_FREEZE_AGAIN_S)  # a program that was killed holds its directory until it has ended
                answer = await self._asked(protocol.Operation.FREEZE)
            if answer.code == errno.EBUSY:
                raise Unavailable(
                    "a program that runs in the sandbox stands in the working directory: end it before the fork"
                )
            if answer.code:
                raise Unavailable(f"the sandbox cannot be frozen: {os.strerror(answer.code)}")
            self._stack = self._stack.frozen(self._frozen)
            self._frozen += 1
            names = [f"a{place}" for place in range(self._stack.ancestors)] + ["."]
            for at in range(0, count, protocol.MOST_FDS // 2):
                part = min(count - at, protocol.MOST_FDS // 2)
                columns = [await self._asked(protocol.Operation.CLONES, name, count=part) for name in names]
                if any(column.code for column in columns):
                    raise Unavailable("the sandbox's layers cannot be passed on")
                mounts += zip(*(column.fds for column in columns), strict=True)
            stack = self._stack.child()
        return await self._start_all(stack, mounts)

    async def _start_all(self, stack: Stack, mounts: Sequence[tuple[int, ...]]) -> list[Box]:
        spec = replace(self.spec, files={})
        try:
            started = await asyncio.gather(*(self._starter(spec, stack, fds) for fds in mounts), return_exceptions=True)
        finally:
            for fds in mounts:
                for fd in fds:
                    os.close(fd)
        boxes = [box for box in started if isinstance(box, Box)]
        failed = [error for error in started if isinstance(error, BaseException)]
        if failed:
            await asyncio.gather(*(box.stop() for box in boxes))
            raise failed[0]
        return boxes

    async def diff(self) -> Sequence[Change]:
        out = protocol.anonymous_file(b"")
        try:
            answer = await self._asked(protocol.Operation.DIFF, fds=[out])
            if answer.operation != protocol.Operation.DIFF or answer.code:
                raise Unavailable(f"the sandbox's files could not be compared (exit {answer.code})")
            return await asyncio.to_thread(lambda: read_changes(os.pread(out, os.fstat(out).st_size, 0)))
        finally:
            os.close(out)

    async def listen(self, port: int) -> socket.socket:
        if not 0 < port < 65536:
            raise BadRequest(f"port: {port} must lie in 1 to 65535", field="port")
        answer = await self._asked(protocol.Operation.LISTEN, count=port)
        if answer.code or not answer.fds:
            raise Unavailable(f"port {port} of the sandbox cannot be had: {os.strerror(answer.code or errno.EIO)}")
        listener = socket.socket(fileno=answer.fds[0])
        listener.setblocking(False)
        return listener

    async def stop(self) -> None:
        if self._line.open:
            with contextlib.suppress(Unavailable, TimeoutError):
                _, answer = self._line.ask(protocol.Operation.STOP)
                async with asyncio.timeout(5.0):
                    await answer
        self.let_go()

    def let_go(self) -> None:
        """Hang up and make sure that the box ends. Idempotent."""
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
    """Parse the records that inside/compare.py writes."""
    from ostinato.worlds.sandbox.inside.compare import HEAD

    found: list[Change] = []
    at = 0
    while at < len(data):
        kind, executable, _, name, size = HEAD.unpack_from(data, at)
        at += HEAD.size
        path, content = os.fsdecode(data[at : at + name]), data[at + name : at + name + size]
        at += name + size
        found.append(Change(path=path, kind=_KINDS[kind], data=content, executable=bool(executable)))
    return found
