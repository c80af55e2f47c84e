"""The namespaces backend: starts boxes of Linux namespaces, as many at once as the settings allow."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.sandbox import Isolation, SandboxSpec
from ostinato.worlds.sandbox.box import Box, Stack
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.host import Zygote
from ostinato.worlds.sandbox.protocol import BoxConnection, StartFlag, anonymous_file
from ostinato.worlds.sandbox.proxy import Proxy, check_hosts
from ostinato.worlds.sandbox.spec_validation import (
    ENVIRONMENT,
    check_environment,
    check_mounts,
    check_names,
    check_no_socket,
    check_workdir,
    pack_files,
    pack_start,
)

_START_S = 20.0


class Boxes:
    r"""A `Backend` of namespaces on this machine. The zygote starts with the first box; `close` ends everything.
    Without `groups` no control group is made, even where it is possible, and a watch enforces the memory limit.

    Example::

        boxes = Boxes(SandboxConfig())
        box = await boxes.start(SandboxSpec(files={"a.txt": b"1"}))
        await box.exec(["sh", "-c", "wc -c a.txt"], timeout=5.0)   # stdout == b"1 a.txt\n"
    """

    def __init__(self, config: SandboxConfig | None = None, *, groups: bool = True) -> None:
        self.config = config or SandboxConfig()
        self._zygote = Zygote(full=True, groups=groups)
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
        check_names(spec.files)
        check_workdir(spec.workdir)
        check_mounts(spec.mounts, spec.workdir)
        check_environment(spec.env)
        check_hosts(spec.hosts)
        if any(not os.path.isabs(layer) for layer in spec.layers):
            raise BadRequest("layers: must be absolute paths of directories", field="layers")
        for source in {os.path.realpath(source) for source in spec.mounts.values()} - self._without_sockets:
            await asyncio.to_thread(check_no_socket, source)
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
        flags = StartFlag.OVERLAY | StartFlag.OWN_NET
        flags |= StartFlag.PROC if self._zygote.hello["proc"] else StartFlag(0)
        flags |= StartFlag.BLOB if spec.files else StartFlag(0)
        flags |= StartFlag.PROXY if spec.hosts else StartFlag(0)
        binds = [(f"h{await self._zygote.layer(source)}", place) for place, source in spec.mounts.items()]
        message = pack_start(
            flags,
            spec.limits,
            spec.workdir,
            stack.lowers,
            layers=len(stack.layers),
            mounts=len(mounts),
            binds=binds,
        )
        line = BoxConnection()
        blobs = [anonymous_file(await asyncio.to_thread(pack_files, spec.files))] if spec.files else []
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
        env = ENVIRONMENT | (Proxy.VARIABLES if spec.hosts else {}) | dict(spec.env)
        return Box(spec, stack, line, ready, env, self._started)

    async def close(self) -> None:
        boxes = list(self._open)
        await asyncio.gather(*(box.stop() for box in boxes))
        await asyncio.to_thread(self._zygote.close)
