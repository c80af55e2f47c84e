"""The `e2b` backend: one virtual machine per sandbox, in E2B's cloud or on a server that implements its API.

A new machine receives the helper program and one archive of layers, mounts and files, in parts. The helper then runs the sandbox's pid 1,
which answers the box's requests.
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
from ostinato.worlds.sandbox.proxy import OpenSandboxes, environment_of
from ostinato.worlds.sandbox.spec_validation import check_spec, pack_files

# ---------------------------------------------------------------- uploads to a new machine


_HERE = Path(__file__).parent
_SHARED = (
    "inside/compare.py", "inside/kernel.py", *(f"gvisor/inside/{name}.py" for name in ("line", "programs", "rootfs", "serve")),
)  # fmt: skip
_IN_MEMORY = 8 << 20
_PART = 16 << 20  # most bytes of one request


@functools.cache
def helper() -> bytes:
    """Return the helper: a zip of modules that the machine's python3 runs."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (*(_HERE / "inside").glob("*.py"), *(_HERE.parent / name for name in _SHARED)):
            if path.name != "__init__.py":
                archive.writestr(path.name, path.read_text())
    return made.getvalue()


def pack_archive(spec: SandboxSpec, owner: int) -> IO[bytes] | None:
    """Return the archive of layers, mounts and files as an open file at its start (on disk if large), or None if there is nothing to send.

    Layers and mounts in it belong to uid `owner`. Sockets and device files are left out. Raises BadRequest for a layer or mount that cannot
    be read.
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
    def normalise(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.isdev() and not member.isfifo():
            return None
        member.uid = member.gid = owner
        member.uname = member.gname = ""
        member.mode |= stat.S_IRWXU if member.isdir() else stat.S_IRUSR
        return member

    try:
        tar.add(Path(source).resolve(), name, filter=normalise)
    except (OSError, tarfile.TarError, RecursionError) as error:
        raise BadRequest(f"{field}: {source!r} cannot be sent ({error})", field=field) from error


# ---------------------------------------------------------------- the box


_KEEP_S = LIFE_S / 5
_STOP_S = 10.0


class E2BBox(SandboxCalls):
    """A remote `Sandbox` with periodic keep-alives while it is open. Created by `E2BBoxes.start`.

    `ending` holds the task that kills the machine until that task is done.
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
        self._keep_alive_task = asyncio.create_task(self._keep_alive())
        self._ended = False

    async def _keep_alive(self) -> None:
        """Send keep-alives, since the machine otherwise expires by itself."""
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
        finally:  # also on cancellation
            self._release()

    def _silent(self, why: str) -> Unavailable:
        """Return Unavailable instead of SandboxBroken, because the connection may be at fault."""
        return Unavailable(why)

    async def _kill(self, why: Unavailable) -> None:
        self._line.close(why)
        if self._ended:
            return
        self._ended = True
        self._keep_alive_task.cancel()
        self.wire.close()
        end = asyncio.create_task(self._end_machine())
        self._ending.add(end)
        end.add_done_callback(self._ending.discard)
        try:
            await asyncio.shield(end)  # a cancellation does not stop the kill
        finally:
            try:
                await self.wire.wait_closed()
            finally:  # also on a second cancellation
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
"""The template's interpreter, found on the machine's PATH."""
_START_S = 60.0
_MISSING = (
    "a running sandbox cannot be forked",
    "system calls are not filtered: the virtual machine alone protects its host",
    "whoever operates the machines can read their contents",
)
_UNCOUNTED = "no memory cgroup in the machine: a poller in the sandbox enforces the limit"


class E2BBoxes:
    """A sandbox `Backend` on E2B's virtual machines. Raises BadConfig if the SDK or the variable E2B_API_KEY is missing."""

    def __init__(self, config: SandboxConfig | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self.config = config or SandboxConfig()
        self._account = Account(self.config.template, environment)
        self._sandboxes = OpenSandboxes[E2BBox](self.config.boxes)
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
        """As `Backend.start`. With `alone`, /proc is empty, so that the program's processes cannot inspect each other."""
        check_spec(spec)
        return await self._sandboxes.start(lambda: self._launch(spec, alone), spec.hosts)

    async def _launch(self, spec: SandboxSpec, alone: bool) -> E2BBox:
        """Start a machine and build the sandbox in it.

        Raises BadRequest for files that do not fit, BadConfig for a template that cannot be used, SandboxRefused, Unavailable.
        """
        # a uid that nothing else uses, so that per-user limits count the programs alone
        owner = 100_000 + secrets.randbelow(1 << 20)
        archive = await asyncio.to_thread(pack_archive, spec, owner)
        try:
            machine = await self._account.machine()
            line = GvisorConnection()
            box = E2BBox(spec, machine, line, environment_of(spec), self._ending)
            try:
                place = f"/root/.ostinato-{secrets.token_hex(8)}"
                await _upload_all(machine, place, archive)
                first = line.peer.dup()
                try:
                    await line.start_reading()
                except BaseException:
                    first.close()
                    raise
                await box.wire.open(f"exec {PYTHON} -I -S -B {place}/helper.pyz {place}", first)
                self._counts = await self._build(spec, line, owner, alone)
            except BaseException:
                await asyncio.shield(box.stop())
                raise
        finally:
            if archive is not None:
                archive.close()
        return box

    async def _build(self, spec: SandboxSpec, line: GvisorConnection, owner: int, alone: bool) -> bool:
        """Have pid 1 build the sandbox. Return True if the machine's kernel counts the programs' memory."""
        mounts = list(spec.mounts)
        try:
            report = await build_sandbox(spec, line, owner=owner, alone=alone, within=_START_S, mounts=mounts)
        except Unavailable as error:
            if any(text in str(error) for text in ("not found", "and 3.10 is needed")):
                raise BadConfig(
                    f"sandbox.template = {self.config.template!r} cannot be used: {error}; it needs python3, 3.10 or newer, on its PATH"
                ) from error
            raise
        if report["error"]:
            raise SandboxRefused(
                f"the template {self.config.template!r} cannot be a sandbox: step {report.get('step')!r}: {report.get('told')}"
            )
        return bool(report["counts"])

    async def close(self) -> None:
        """Stop all open sandboxes. Also wait for kills whose caller was cancelled, so that they are not cut off when the process exits."""
        try:
            await self._sandboxes.close()
        finally:
            if self._ending:
                await asyncio.wait(self._ending, timeout=_STOP_S)


async def _upload_all(machine: Machine, place: str, archive: IO[bytes] | None) -> None:
    await machine.upload(f"{place}/helper.pyz", helper())
    if archive is not None:
        for number in itertools.count():
            if not (part := await asyncio.to_thread(archive.read, _PART)):
                break
            await machine.upload(f"{place}/part.{number}", part)
