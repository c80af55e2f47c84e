"""Runs code that a model wrote, where it can reach nothing: no host files, no network, no other process, no second of extra time.

In the data flow: the graders (and the demo's simulated users) give `SingleRuns.run` a program and get an `ExecResult`. Every run has
its own user, mount, pid, network, ipc and uts namespaces, a uid that is not root inside or outside, no capabilities, rlimits, a
read-only view of the Python runtime and an empty /tmp that vanishes with the run. `jail.py` does the work in a separate process.
Namespaces share the host's kernel: this holds against the code that models write, not against a kernel exploit. Total memory is
bounded by processes times `memory_mb`, not by a cgroup.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from pydantic import BaseModel, Field

from ostinato.core.errors import BadRequest, SandboxRefused, Unavailable
from ostinato.core.sandboxing import ExecResult

_JAIL = Path(__file__).with_name("jail.py")
_GRACE_S = 10.0  # beyond a run's own deadline, before the jail itself is taken for dead
_ENABLE = (
    "To allow it: user.max_user_namespaces > 0; kernel.unprivileged_userns_clone = 1 (Debian); "
    "kernel.apparmor_restrict_unprivileged_userns = 0 (Ubuntu); in a container, a seccomp and AppArmor profile that permits "
    "unshare and mount (docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined, plus --cap-add SYS_ADMIN as root)."
)


class SandboxConfig(BaseModel, frozen=True, extra="forbid"):
    """Limits of one run, and how many runs at once."""

    concurrency: int = Field(default=2, ge=1, le=256, description="Runs at the same time; more wait their turn.")
    memory_mb: int = Field(default=256, ge=32, description="Address space of each process of a run, in MiB.")
    disk_mb: int = Field(default=16, ge=1, description="Size of the run's /tmp and of any file in it, in MiB.")
    processes: int = Field(
        default=16, ge=4, description="Processes and threads of a run, the sandbox's own two included."
    )
    open_files: int = Field(default=64, ge=8, le=1024, description="Open files of each process of a run.")
    output_bytes: int = Field(default=65536, ge=1, description="stdout or stderr beyond this many bytes ends the run.")


def python_inside() -> str:
    """The interpreter's path inside a run, for an argv: the base installation's, since a virtual environment is not visible."""
    return f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def _checked(files: Mapping[str, bytes]) -> dict[str, str]:
    """File names that stay below /tmp, contents as Latin-1 text for the JSON request."""
    for name in files:
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or name.endswith("/") or "\0" in name:
            raise BadRequest(f"files: {name!r} must be a relative path without '..'", field="files")
    return {name: bytes(data).decode("latin-1") for name, data in files.items()}


def _memfd(data: bytes) -> int:
    """An anonymous file that holds the bytes, positioned at its start."""
    fd = os.memfd_create("ostinato")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class _Pipe:
    """The read end of a pipe, drained into memory up to `cap` bytes."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.data = b""
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # True: ended, False: too much
        asyncio.get_running_loop().add_reader(self.read, self._drain)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            part = os.read(self.read, 65536)
            self.data += part[: self.cap - len(self.data)]
            if not part or len(self.data) >= self.cap:
                asyncio.get_running_loop().remove_reader(self.read)
                self.ended.set_result(not part)

    def sent(self) -> None:
        """The write end now belongs to the other process only."""
        os.close(self.write)
        self.write = -1

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.read)
        self.ended.cancel()
        os.close(self.read)
        if self.write >= 0:
            os.close(self.write)


class SingleRuns:
    r"""Isolated runs of untrusted programs. An async context manager; the jail starts with the first run.

    Example::

        async with SingleRuns(SandboxConfig()) as sandbox:
            result = await sandbox.run("print(6 * 7)", timeout=2.0)   # result.stdout == b"42\n"

    Raises SandboxRefused where the kernel cannot isolate; there is no mode without isolation.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._turns = asyncio.Semaphore(self.config.concurrency)
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def __aenter__(self) -> SingleRuns:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the jail and every run in it. A later run starts a new one."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

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
            timeout: wall seconds until everything is killed.

        Raises:
            BadRequest: a file name that leaves the working directory.
            SandboxRefused: the kernel or container refused a step of the isolation.
            Unavailable: the jail died twice in a row.
        """
        request = self._request(program, dict(files or {}), timeout)
        async with self._turns:
            for attempt in (1, 2):  # a jail that somebody killed is replaced once
                control = await self._started()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    answer = await self._exchange(control, request, stdin, timeout)
                    if answer is not None:
                        return answer
                if self._control is control:
                    self.close()
                if attempt == 2:
                    break
        raise Unavailable(
            "the sandbox's jail process died during two attempts; is something killing it (out of memory)?"
        )

    def _request(self, program: str | Sequence[str], files: dict[str, bytes], timeout: float) -> bytes:
        python = isinstance(program, str)
        if isinstance(program, str):
            files["main.py"] = program.encode("utf-8", "surrogatepass")
            program = ["/tmp/main.py"]
        config = self.config
        limits = {
            "CPU": math.ceil(timeout) + 1,
            "AS": config.memory_mb << 20,
            "FSIZE": config.disk_mb << 20,
            "NPROC": config.processes,
            "NOFILE": config.open_files,
            "CORE": 0,
        }
        env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        fields = {
            "argv": list(program),
            "python": python,
            "env": env,
            "files": _checked(files),
            "limits": limits,
            "disk_bytes": config.disk_mb << 20,
            "timeout": timeout,
        }
        return json.dumps(fields).encode()

    async def _started(self) -> socket.socket:
        async with self._starting:
            if self._control is not None:
                return self._control
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            with theirs:
                argv = [sys.executable, "-I", "-S", str(_JAIL), str(theirs.fileno()), sys.base_prefix]
                self._process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds, once
                    argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, env={}, cwd="/",
                )  # fmt: skip
            self._control = ours
            try:
                async with asyncio.timeout(_GRACE_S):
                    hello = await asyncio.get_running_loop().sock_recv(ours, 4096)
                refusal: dict[str, Any] = json.loads(
                    hello or b'{"step": "start the jail", "error": "it ended at once"}'
                )
                if refusal:
                    raise _refused(refusal)
            except BaseException:
                self.close()
                raise
            return ours

    async def _exchange(
        self, control: socket.socket, request: bytes, stdin: bytes, timeout: float
    ) -> ExecResult | None:
        """One run; None if the jail died under it."""
        inputs: list[int] = []
        cap = self.config.output_bytes
        out, err, status = pipes = [_Pipe(cap + 1), _Pipe(cap + 1), _Pipe(65536)]
        try:
            inputs += [_memfd(request)]
            inputs += [_memfd(stdin)]
            socket.send_fds(control, [b"run"], [*inputs, *(pipe.write for pipe in pipes)])
            for pipe in pipes:
                pipe.sent()
            flooded = False
            async with asyncio.timeout(timeout + _GRACE_S):
                waiting = {out.ended, err.ended, status.ended}
                while not status.ended.done() and not flooded:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    flooded = any(not pipe.ended.result() for pipe in (out, err) if pipe.ended in done)
                if not flooded:
                    flooded = not all(await asyncio.gather(out.ended, err.ended))
        except TimeoutError:
            return None
        finally:
            for fd in inputs:
                os.close(fd)
            for pipe in pipes:  # closing the status pipe makes the jail kill a run that still goes on
                pipe.close()
        if flooded:
            answer: dict[str, Any] = {"code": -9, "reason": "output", "seconds": math.nan}
        elif not status.data:
            return None
        else:
            answer = json.loads(status.data)
        return self._result(answer, out.data[:cap], err.data[:cap])

    def _result(self, answer: dict[str, Any], stdout: bytes, stderr: bytes) -> ExecResult:
        if "step" in answer:
            raise _refused(answer)
        reason = answer["reason"] or None
        return ExecResult(
            code=answer["code"],
            stdout=stdout,
            stderr=stderr,
            timed_out=reason == "timeout",
            killed_reason=reason,
            seconds=answer["seconds"],
        )


def _refused(report: Mapping[str, Any]) -> SandboxRefused:
    return SandboxRefused(
        f"generated code cannot be isolated here: step '{report['step']}' failed: {report['error']}. {_ENABLE}"
    )
