"""The `gvisor` backend: one runsc container per sandbox, and single runs in such containers. `inside/` runs within the container."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ostinato.core.errors import BadConfig, BadRequest, SandboxBroken, SandboxRefused, Unavailable
from ostinato.core.sandbox import ExecResult, Isolation, Limits, SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.gvisor.ground import NOBODY, Ground
from ostinato.worlds.sandbox.gvisor.line import GvisorConnection, Ports, SandboxCalls, build_sandbox
from ostinato.worlds.sandbox.host import python_inside
from ostinato.worlds.sandbox.launcher import system_call_filter
from ostinato.worlds.sandbox.proxy import OpenSandboxes, environment_of
from ostinato.worlds.sandbox.spec_validation import ENVIRONMENT, check_directories, check_spec, pack_files

# ---------------------------------------------------------------- the box


PANIC = "panic"
"""The name of the file in which Go's runtime reports why gVisor's kernel crashed."""

_REPORT = 1 << 16  # most characters of a crash report that are read
_FAULT = re.compile(r"^(panic|fatal error|SIG[A-Z]+): .*", re.MULTILINE)
_SHORTAGE = re.compile(
    r"out of memory|cannot allocate|newosproc|create new OS thread|pthread_create|too many open files"
)
_STOP_S = 5.0
_WATCH_S = 1.0
_KERNEL_MB = 256  # memory of gVisor's kernel itself, beyond the programs' limit


class GVisorBox(SandboxCalls):
    """A `Sandbox` in a runsc container. Created by `GVisorBoxes.start`."""

    called = "gVisor sandbox"

    def __init__(
        self,
        spec: SandboxSpec,
        line: GvisorConnection,
        ports: Ports,
        process: asyncio.subprocess.Process,
        place: Path,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(spec, line, env)
        self._ports, self._process, self._place = ports, process, place
        self.report: dict[str, Any] = {}  # pid 1's report when it had built the sandbox
        self._kernel: tuple[int, int] | None = None  # gVisor's own process: its pid and its pidfd
        line.at_end = self._fault
        watcher = asyncio.create_task(self._watch())
        self.on_stop += [watcher.cancel, self._close_pidfd]

    def _open_port(self, port: int) -> socket.socket:
        return self._ports.open(port)

    def _close_port(self, port: int) -> None:
        self._ports.close_port(port)

    async def stop(self) -> None:
        self._line.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            await self._kill(Unavailable("the sandbox is gone"))
        finally:  # also on cancellation
            self._release()

    async def _watch(self) -> None:
        """Kill a sandbox whose kernel uses too much memory: no limit inside counts its own state, such as that of empty files."""
        while self._line.open:
            await asyncio.sleep(_WATCH_S)
            limit = self.spec.limits.memory_mb + _KERNEL_MB
            if (kernel := self._kernel_process()) and _anonymous_mb(kernel[0]) > limit:
                await self._kill(SandboxBroken(f"the sandbox is gone: its kernel needed more than {limit} MiB"))

    def _fault(self) -> SandboxBroken | None:
        """Return an error if the sandbox's kernel crashed after a program was started, so that the program's system calls caused it.

        Go's runtime writes the crash report, to a file that nothing inside can write to. Return None if there is no report, because the
        kernel was killed from outside, or if it tells of a lack of memory or threads, which is the machine's fault.
        """
        report = ""
        with contextlib.suppress(OSError), (self._place / PANIC).open(errors="replace") as file:
            report = file.read(_REPORT)
        fault = _FAULT.search(report)
        if not self._ran or fault is None or _SHORTAGE.search(report):
            return None
        return SandboxBroken(
            f"the sandbox is gone: its kernel met a fault while it served the programs ({fault[0][:200]})"
        )

    def _kernel_process(self) -> tuple[int, int] | None:
        """Return the pid and pidfd of gVisor's kernel, or None before it has started and after it has ended."""
        if self._process.returncode is not None:
            return None
        if self._kernel is None:
            with contextlib.suppress(OSError, ValueError):
                pid = int((self._place / "pid").read_text())
                self._kernel = pid, os.pidfd_open(pid)
        return self._kernel

    def _close_pidfd(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            os.close(kernel[1])

    async def _kill(self, why: Unavailable) -> None:
        """Kill gVisor's kernel, after which runsc cleans up and exits."""
        self._line.close(why)
        if kernel := self._kernel_process():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(kernel[1], signal.SIGKILL)
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _anonymous_mb(pid: int) -> int:
    """Return the anonymous memory of a process in MiB. It excludes the programs' memory, which gVisor's kernel keeps in a file."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) >> 10
    return 0


# ---------------------------------------------------------------- the OCI runtime configuration of a container


INSIDE, INIT = 1000, 1  # the uids of programs and of pid 1 in the sandbox
STRANGER = NOBODY - 1  # a host uid that owns nothing
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_RESOURCE")

_RUN = "import sys; sys.path.insert(0, '/.box/code'); import serve; serve.main()"


def layers_owner(layers: Sequence[str]) -> int:
    """Return the host uid that owns the layers, to which programs are mapped; STRANGER without layers. Raises BadRequest."""
    owners = {os.stat(layer).st_uid for layer in layers}
    if len(owners) > 1:
        raise BadRequest(
            f"layers: they belong to several users ({', '.join(map(str, sorted(owners)))}), and gVisor can show one of them as the "
            "programs' own; give them one owner",
            field="layers",
        )
    return owners.pop() if owners else STRANGER


def mappings(owner: int) -> list[dict[str, int]]:
    """Return the uid mappings of a sandbox started by root: its root is nobody on the host, and its programs are `owner`.

    The host's root is mapped as well, so that directories only root may enter (an interpreter in its home) can be mounted.
    """
    nobody = NOBODY if owner != NOBODY else NOBODY - 1
    pairs = {0: nobody, INSIDE: owner} | ({} if owner == 0 else {INSIDE + 1: 0})
    return [{"containerID": inside, "hostID": outside, "size": 1} for inside, outside in pairs.items()]


def _bind(source: str | Path, place: str) -> dict[str, Any]:
    return {"destination": place, "type": "bind", "source": str(source), "options": ["ro"]}


def _tmpfs(place: str, *options: str) -> dict[str, Any]:
    return {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", *options]}


def configuration(
    spec: SandboxSpec, ground: Ground, owner: int | None, covers: Iterable[tuple[str, str]] = ()
) -> dict[str, Any]:
    """Return the contents of config.json.

    `owner` is None if the sandbox is not started by root; then no other user can be mapped into it. `covers` are further mounts as
    (host path, path in the sandbox), which hide files below the ordinary ones.
    """
    mounts: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    mounts += [_bind(source, seen) for source, seen in ground.shown()]
    mounts += [_bind(source, seen) for seen, source in spec.mounts.items()]
    mounts += [_bind(source, seen) for source, seen in covers]
    mounts += [_tmpfs("/.box", "size=4m", "mode=700", f"uid={INIT}", f"gid={INIT}")]
    mounts += [_bind(ground.place / "code", "/.box/code")]
    mounts += [_bind(layer, f"/.box/layers/{number}") for number, layer in enumerate(spec.layers)]
    mounts += [_tmpfs(seen) for seen in ("/tmp", "/dev/shm", spec.workdir)]  # pid 1 mounts its own over them
    capabilities = [f"CAP_{name}" for name in _CAPABILITIES]
    namespaces = [{"type": name} for name in ("pid", "mount", "ipc", "uts", "network")]
    id_mappings = mappings(owner) if owner is not None else []
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": INIT, "gid": INIT},
            "args": [python_inside(), "-s", "-S", "-P", "-B", "-c", _RUN],
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096}],
        },
        "root": {"path": str(ground.root), "readonly": True},
        "hostname": "workspace",
        "mounts": mounts,
        "linux": {
            "namespaces": [*namespaces, {"type": "user"}] if id_mappings else namespaces,
            **({"uidMappings": id_mappings, "gidMappings": id_mappings} if id_mappings else {}),
        },
    }


# ---------------------------------------------------------------- the backend


_START_S = 30.0
# how gVisor intercepts system calls, the faster first; releases before 2023 have only the second
_PLATFORMS = ("systrap", "ptrace")
_INSTALL = (
    'sandbox.backend = "gvisor" needs runsc, which is not on the PATH. To get it: apt-get install runsc (Debian, Ubuntu), or a release '
    'from https://gvisor.dev/docs/user_guide/install; or set sandbox.backend = "namespaces"'
)
_MISSING = (
    "a running sandbox cannot be forked",
    "no memory cgroup: a poller in the sandbox enforces the limit",
)


class GVisorBoxes:
    """A sandbox `Backend` that runs gVisor containers on this machine. Raises BadConfig if runsc is not installed."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        runsc = shutil.which("runsc")
        if runsc is None:
            raise BadConfig(_INSTALL)
        self._runsc = runsc
        self._lock = asyncio.Lock()
        self._sandboxes = OpenSandboxes[GVisorBox](self.config.boxes)
        self._ground: Ground | None = None
        self.platform = ""
        self._statx_mended = False

    async def isolation(self) -> Isolation:
        await self._ensure_ground()
        missing = _MISSING
        if self._statx_mended:
            missing += (
                "this runsc is from before 2023: a preloaded library makes up for a flag of statx that it refuses",
            )
        if os.getuid() != 0:
            missing += ("not started by root: programs see themselves as root, without root's rights",)
        return Isolation(kind="gvisor", forks=False, counts_memory=False, missing=missing)

    async def _ensure_ground(self) -> Ground:
        """Return the backend's directories. The first call starts a trial sandbox to find a platform that works. Raises SandboxRefused."""
        async with self._lock:
            if self._ground is None:
                ground = await asyncio.to_thread(Ground)
                try:
                    await self._try(ground)
                except BaseException:
                    await asyncio.to_thread(ground.close)
                    raise
                self._ground = ground
            return self._ground

    async def _try(self, ground: Ground) -> None:
        refused: list[str] = []
        for self.platform in _PLATFORMS:
            try:
                box = await self._launch(SandboxSpec(), ground)
            except Unavailable as error:
                refused.append(f"{self.platform}: {error}")
                continue
            await box.stop()
            self._statx_mended = not box.report["statx"]
            if self._statx_mended:
                await asyncio.to_thread(ground.mend_statx)
            return
        raise SandboxRefused(f"generated code cannot be isolated here: runsc starts no sandbox ({'; '.join(refused)})")

    async def start(self, spec: SandboxSpec, *, alone: bool = False) -> GVisorBox:
        """As `Backend.start`. With `alone`, /proc is empty, so that the program's processes cannot inspect each other."""
        check_spec(spec)
        owner = layers_owner(spec.layers)
        for source in spec.mounts.values():
            seen = os.stat(source)
            if os.getuid() == 0 and seen.st_uid != owner and seen.st_mode & 0o005 != 0o005:
                raise BadRequest(
                    f"mounts: {source!r} is not readable for everybody, so not for programs either; run chmod -R o+rX on it",
                    field="mounts",
                )
        ground = await self._ensure_ground()
        return await self._sandboxes.start(lambda: self._launch(spec, ground, alone=alone), spec.hosts)

    def _command(self, ground: Ground, place: Path) -> list[str]:
        options = [f"--root={ground.state}", "--network=none", f"--platform={self.platform}", "--ignore-cgroups"]
        options += ["--overlay2=root:memory"]  # mount points are made in memory
        options += [f"--panic-log={place / PANIC}"]
        options += ["--file-access-mounts=exclusive", *(["--rootless"] if os.getuid() else [])]
        return [
            self._runsc,
            *options,
            "run",
            f"--bundle={place}",
            f"--pid-file={place / 'pid'}",
            f"{ground.place.name}-{place.name}",
        ]

    async def _launch(self, spec: SandboxSpec, ground: Ground, *, alone: bool = False) -> GVisorBox:
        """Start one container.

        Raises BadRequest for files that do not fit and for a directory that no longer exists, Unavailable, SandboxRefused.
        """
        check_directories(spec)  # the spec may have been checked long before the start got its turn
        owner = layers_owner(spec.layers) if os.getuid() == 0 else None
        line = GvisorConnection()
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(line.close)
            place = cleanup.enter_context(ground.box())
            ports = Ports(place / "ports")
            cleanup.callback(ports.close)
            covers = await asyncio.to_thread(lambda: list(ground.covers(spec.mounts))) if owner == 0 else []
            (place / "config.json").write_text(json.dumps(configuration(spec, ground, owner, covers)))
            errors = os.open(place / "errors", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            cleanup.callback(os.close, errors)
            process = await asyncio.create_subprocess_exec(
                *self._command(ground, place), stdin=line.peer.fileno(), stdout=ports.peer.fileno(), stderr=errors,
                env={"PATH": os.environ.get("PATH", os.defpath)}, cwd="/", start_new_session=True,
            )  # fmt: skip
            ports.close_peer()
            await line.start_reading()
            box = GVisorBox(spec, line, ports, process, place, environment_of(spec))
            try:
                box.report = await self._build(spec, line, owner, alone=alone)
            except Unavailable as error:
                await box.stop()
                errors_tail = (
                    os.pread(errors, 1500, max(0, os.fstat(errors).st_size - 1500)).decode(errors="replace").strip()
                )
                raise Unavailable(f"{error}: {errors_tail or 'runsc said nothing'}") from error
            except BaseException:
                await box.stop()
                raise
            box.on_stop.append(cleanup.pop_all().close)
        return box

    async def _build(
        self, spec: SandboxSpec, line: GvisorConnection, owner: int | None, *, alone: bool
    ) -> dict[str, Any]:
        filter = (await asyncio.to_thread(system_call_filter)).hex()
        files = await asyncio.to_thread(pack_files, spec.files)
        user = 0 if owner is None else INSIDE  # not started by root: only the sandbox's root maps to our user
        report = await build_sandbox(spec, line, files, owner=user, alone=alone, filter=filter, within=_START_S)
        if report["error"]:
            raise Unavailable(f"the sandbox could not be built: step {report.get('step')!r}: {report.get('told')}")
        return report

    async def close(self) -> None:
        await self._sandboxes.close()
        async with self._lock:
            if self._ground is not None:
                await asyncio.to_thread(self._ground.close)
                self._ground = None


# ---------------------------------------------------------------- single runs, each in a new sandbox of a backend


class IsolatingBackend(Protocol):
    """A backend whose `start` can hide processes from each other."""

    async def start(self, spec: SandboxSpec, *, alone: bool = False) -> Sandbox:
        """As `Backend.start`. With `alone`, /proc is empty."""
        ...


class RunsInBoxes:
    r"""The counterpart of `SingleRuns` for other backends, slower by the start of a sandbox and of an interpreter.

    The caller owns the backend. /proc is empty, since graded code could read its grader's input through it. `python` is the path of an
    interpreter in the sandbox, or "" for this machine's own, which is mounted there.
    """

    def __init__(self, backend: IsolatingBackend, config: SandboxConfig, *, python: str = "") -> None:
        self._backend = backend
        self._python = python or python_inside()
        self._limits = Limits(
            memory_mb=config.memory_mb,
            disk_mb=config.disk_mb,
            processes=config.processes,
            open_files=config.open_files,
            output_bytes=config.output_bytes,
        )

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        timeout: float,
    ) -> ExecResult:
        """Run Python source, or an argv with an absolute path, in a fresh sandbox with `files` in its working directory.

        Raises BadRequest for a file name outside the working directory, SandboxRefused, Unavailable.
        """
        placed = dict(files or {})
        if isinstance(program, str):
            placed["main.py"] = program.encode("utf-8", "surrogatepass")
            program = [self._python, "main.py"]
        box = await self._backend.start(SandboxSpec(files=placed, limits=self._limits), alone=True)
        try:
            return await box.exec(program, stdin=stdin, timeout=timeout)
        finally:
            await box.stop()
