"""The E2B backend: one virtual machine per sandbox, in E2B's cloud or on a server that speaks its protocol.

A new machine is sent the helper, and one archive of layers, mounts and files, in parts. Then the box sends requests to its pid 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import io
import itertools
import logging
import os
import secrets
import shutil
import socket
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ostinato.core.errors import BadConfig, BadRequest, OstinatoError, SandboxRefused, Unavailable
from ostinato.core.sandbox import Isolation, SandboxSpec
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.e2b.account import LIFE_S, Account, Machine, MachineGone
from ostinato.worlds.sandbox.e2b.wire import Wire
from ostinato.worlds.sandbox.gvisor.line import GvisorConnection, SandboxCalls, build_sandbox, listen_at
from ostinato.worlds.sandbox.proxy import SandboxPlaces, environment_of
from ostinato.worlds.sandbox.spec_validation import check_spec, pack_files

# ---------------------------------------------------------------- what is sent to a new machine


_HERE = Path(__file__).parent
_SHARED = (
    "inside/compare.py", "inside/kernel.py", *(f"gvisor/inside/{name}.py" for name in ("line", "programs", "rootfs", "serve")),
)  # fmt: skip
_IN_MEMORY = 8 << 20
_PART = 16 << 20  # most bytes of one request


@functools.cache
def helper() -> bytes:
    """The zip of modules that the machine's python3 runs."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (*(_HERE / "inside").glob("*.py"), *(_HERE.parent / name for name in _SHARED)):
            if path.name != "__init__.py":
                archive.writestr(path.name, path.read_text())
    return made.getvalue()


def parcel(spec: SandboxSpec, owner: int) -> IO[bytes] | None:
    """The archive, rewound, and on disk if it is large; None if there is nothing to send. Layers and mounts in it belong to `owner`.

    Sockets and device files of a layer or mount are left out. Raises BadRequest for a layer or mount that cannot be read.
    """
    if not (spec.layers or spec.mounts or spec.files):
        return None
    made: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(
            fileobj=made, mode="w:gz", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape", compresslevel=1
        ) as tar:  # fmt: skip
            for number, layer in enumerate(spec.layers):
                _add(tar, "layers", layer, f"layers/{number}", owner)
            for number, source in enumerate(spec.mounts.values()):
                _add(tar, "mounts", source, f"mounts/{number}", owner)
            if spec.files:
                blob = pack_files(spec.files)
                member = tarfile.TarInfo("files")
                member.size = len(blob)
                tar.addfile(member, io.BytesIO(blob))
        made.seek(0)
    except BaseException:
        made.close()
        raise
    return made


def _add(tar: tarfile.TarFile, field: str, source: str, name: str, owner: int) -> None:
    def given(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.isdev() and not member.isfifo():
            return None
        member.uid = member.gid = owner
        member.uname = member.gname = ""
        member.mode |= stat.S_IRWXU if member.isdir() else stat.S_IRUSR
        return member

    try:
        tar.add(Path(source).resolve(), name, filter=given)
    except (OSError, tarfile.TarError, RecursionError) as error:
        raise BadRequest(f"{field}: {source!r} cannot be sent ({error})", field=field) from error


# ---------------------------------------------------------------- the box


_KEEP_S = LIFE_S / 5
_STOP_S = 10.0


class E2BBox(SandboxCalls):
    """A remote `Sandbox`, kept alive while it is open. Made by `E2BBoxes.start`. `ending` gets the task that ends the machine, until it
    is done.
    """

    called = "sandbox of E2B's"

    def __init__(
        self,
        spec: SandboxSpec,
        machine: Machine,
        line: GvisorConnection,
        env: Mapping[str, str],
        ending: set[asyncio.Task[None]],
    ) -> None:
        super().__init__(spec, line, env)
        self._machine, self._ending = machine, ending
        self.wire = Wire(machine, lambda why: line.close(Unavailable(why)))
        self._ports = tempfile.mkdtemp(prefix="ostinato-e2b-")
        self._place = os.open(self._ports, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._keeping = asyncio.create_task(self._keep())
        self._ended = False

    async def _keep(self) -> None:
        """Keep extending the machine's life, since it otherwise ends by itself."""
        while True:
            await asyncio.sleep(_KEEP_S)
            try:
                await self._machine.keep()
            except MachineGone as error:
                self._line.close(error)
                return
            except OstinatoError as error:
                logging.getLogger(__name__).warning("%s", error)

    def _open_port(self, port: int) -> socket.socket:
        if port in self.wire.ports:
            raise OSError(errno.EADDRINUSE, "it is listened at already")
        listener, path = listen_at(self._place, port)
        self.wire.listen(port, path)
        return listener

    def _close_port(self, port: int) -> None:
        self.wire.ports.pop(port, None)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._ports}/{port}")

    async def stop(self) -> None:
        try:
            await self._kill(Unavailable("the sandbox is gone"))
        finally:  # also if it is cancelled
            self._release()

    def _silent(self, why: str) -> Unavailable:
        """Not SandboxBroken, because the connection in between may be what fails."""
        return Unavailable(why)

    async def _kill(self, why: Unavailable) -> None:
        self._line.close(why)
        if self._ended:
            return
        self._ended = True
        self._keeping.cancel()
        self.wire.close()
        end = asyncio.create_task(self._end_machine())
        self._ending.add(end)
        end.add_done_callback(self._ending.discard)
        try:
            await asyncio.shield(end)  # if this is cancelled, the machine ends all the same
        finally:
            try:
                await self.wire.left()
            finally:  # also if it is cancelled again
                os.close(self._place)
                shutil.rmtree(self._ports, ignore_errors=True)

    async def _end_machine(self) -> None:
        try:
            async with asyncio.timeout(_STOP_S):
                await self._machine.kill()
        except (OstinatoError, TimeoutError) as error:
            logging.getLogger(__name__).warning(
                "sandbox %s may live for %s more seconds: %s", self._machine.name, LIFE_S, error
            )


# ---------------------------------------------------------------- the backend


PYTHON = "python3"
"""The interpreter inside, found on the PATH: the template's, not the one that runs this."""
_START_S = 60.0
_MISSING = (
    "a living sandbox cannot be copied",
    "system calls are not filtered: the virtual machine is what stands between",
    "whoever runs the machines can read what is in them",
)
_UNCOUNTED = "no memory cgroup in the machine: a watch in it keeps the limit"


class E2BBoxes:
    """A `Backend` of E2B's virtual machines. Raises BadConfig without the SDK, or without a key in the variable E2B_API_KEY."""

    def __init__(self, config: SandboxConfig | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self.config = config or SandboxConfig()
        self._account = Account(self.config.template, environment)
        self._places = SandboxPlaces[E2BBox](self.config.boxes)
        self._counts: bool | None = None
        self._ending = set[asyncio.Task[None]]()

    async def isolation(self) -> Isolation:
        if self._counts is None:
            await (await self.start(SandboxSpec())).stop()
        counts = bool(self._counts)
        return Isolation(
            kind="e2b", forks=False, counts_memory=counts, missing=_MISSING if counts else (*_MISSING, _UNCOUNTED)
        )

    async def start(self, spec: SandboxSpec, *, alone: bool = False) -> E2BBox:
        """As `Backend.start`. With `alone`, /proc is empty, so that no process of a program can inspect another."""
        check_spec(spec)
        return await self._places.start(lambda: self._launch(spec, alone), spec.hosts)

    async def _launch(self, spec: SandboxSpec, alone: bool) -> E2BBox:
        """Start a machine and build the sandbox in it.

        Raises BadRequest for files that do not fit, BadConfig for a template that cannot be used, SandboxRefused, Unavailable.
        """
        # a uid of its own, so that per-user limits count no other processes
        owner = 100_000 + secrets.randbelow(1 << 20)
        archive = await asyncio.to_thread(parcel, spec, owner)
        try:
            machine = await self._account.machine()
            line = GvisorConnection()
            box = E2BBox(spec, machine, line, environment_of(spec), self._ending)
            try:
                place = f"/root/.ostinato-{secrets.token_hex(8)}"
                await _furnish(machine, place, archive)
                first = line.theirs.dup()
                try:
                    await line.sent()
                except BaseException:
                    first.close()
                    raise
                await box.wire.open(f"exec {PYTHON} -I -S -B {place}/helper.pyz {place}", first)
                self._counts = await self._built(spec, line, owner, alone)
            except BaseException:
                await asyncio.shield(box.stop())
                raise
        finally:
            if archive is not None:
                archive.close()
        return box

    async def _built(self, spec: SandboxSpec, line: GvisorConnection, owner: int, alone: bool) -> bool:
        """Have pid 1 build the sandbox. Returns True if the kernel counts memory there."""
        mounts = list(spec.mounts)
        try:
            said = await build_sandbox(spec, line, owner=owner, alone=alone, within=_START_S, mounts=mounts)
        except Unavailable as error:
            if any(text in str(error) for text in ("not found", "and 3.10 is needed")):
                raise BadConfig(
                    f"sandbox.template = {self.config.template!r} cannot be used: {error}; it needs python3, 3.10 or newer, on its PATH"
                ) from error
            raise
        if said["error"]:
            raise SandboxRefused(
                f"the template {self.config.template!r} cannot be a sandbox: step {said.get('step')!r}: {said.get('told')}"
            )
        return bool(said["counts"])

    async def close(self) -> None:
        """Stop all open sandboxes, and wait for machines whose stop was cancelled: their end must not be cancelled with the program's."""
        try:
            await self._places.close()
        finally:
            if self._ending:
                await asyncio.wait(self._ending, timeout=_STOP_S)


async def _furnish(machine: Machine, place: str, archive: IO[bytes] | None) -> None:
    await machine.upload(f"{place}/helper.pyz", helper())
    if archive is not None:
        for number in itertools.count():
            if not (part := await asyncio.to_thread(archive.read, _PART)):
                break
            await machine.upload(f"{place}/part.{number}", part)
