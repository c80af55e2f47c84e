"""The gVisor backend: one runsc container per sandbox, the host's side of a container, and single runs. Its other side is `inside/`."""

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
from ostinato.worlds.sandbox.proxy import SandboxPlaces, environment_of
from ostinato.worlds.sandbox.spec_validation import ENVIRONMENT, check_directories, check_spec, pack_files

# ---------------------------------------------------------------- the box


PANIC = "panic"
"""The file of a box in which Go's runtime reports why gVisor's kernel crashed."""

_REPORT = 1 << 16  # characters of a report that are read
_FAULT = re.compile(r"^(panic|fatal error|SIG[A-Z]+): .*", re.MULTILINE)
_SHORTAGE = re.compile(
    r"out of memory|cannot allocate|newosproc|create new OS thread|pthread_create|too many open files"
)
_STOP_S = 5.0
_WATCH_S = 1.0
_KERNEL_MB = 256  # what gVisor's kernel itself may use beyond the programs' own limit


class GVisorBox(SandboxCalls):
    """A `Sandbox` whose kernel is gVisor. Made by `GVisorBoxes.start`."""

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
        self.report: dict[str, Any] = {}  # what pid 1 said when the sandbox was built
        self._kernel: tuple[int, int] | None = None  # gVisor's own process: its pid and its pidfd
        line.at_end = self._fault
        watching = asyncio.create_task(self._watch())
        self.on_stop += [watching.cancel, self._let_go]

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
        finally:  # also if it is cancelled
            self._release()

    async def _watch(self) -> None:
        """End a sandbox whose kernel grows without end: no limit inside counts the kernel's own state, such as that for empty files."""
        while self._line.open:
            await asyncio.sleep(_WATCH_S)
            most = self.spec.limits.memory_mb + _KERNEL_MB
            if (kernel := self._found()) and _anonymous_mb(kernel[0]) > most:
                await self._kill(SandboxBroken(f"the sandbox is gone: its kernel needed more than {most} MiB"))

    def _fault(self) -> SandboxBroken | None:
        """Why the sandbox's kernel crashed, if it did so after a program was started: then the programs' own system calls caused it.

        Go's runtime writes the report, to a file that nothing inside can write to. A kernel that was killed from outside leaves no
        report, and one about a lack of memory or threads is this machine's fault. Both give None.
        """
        report = ""
        with contextlib.suppress(OSError), (self._place / PANIC).open(errors="replace") as file:
            report = file.read(_REPORT)
        found = _FAULT.search(report)
        if not self._ran or found is None or _SHORTAGE.search(report):
            return None
        return SandboxBroken(
            f"the sandbox is gone: its kernel met a fault while it served the programs ({found[0][:200]})"
        )

    def _found(self) -> tuple[int, int] | None:
        """The pid and pidfd of gVisor's kernel, or None before it has started and after it has ended."""
        if self._process.returncode is not None:
            return None
        if self._kernel is None:
            with contextlib.suppress(OSError, ValueError):
                pid = int((self._place / "pid").read_text())
                self._kernel = pid, os.pidfd_open(pid)
        return self._kernel

    def _let_go(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            os.close(kernel[1])

    async def _kill(self, why: Unavailable) -> None:
        """End the sandbox from outside: kill gVisor's kernel, after which runsc cleans up and exits."""
        self._line.close(why)
        if kernel := self._found():
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
    """Anonymous memory of a process in MiB. The programs' memory is not in it, since gVisor's kernel keeps that in a file."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) >> 10
    return 0


# ---------------------------------------------------------------- a spec as the OCI configuration that runsc starts with


INSIDE, INIT = 1000, 1  # the users that programs and pid 1 run as, in the sandbox's own kernel
STRANGER = NOBODY - 1  # a host user who owns nothing
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_RESOURCE")

_RUN = "import sys; sys.path.insert(0, '/.box/code'); import serve; serve.main()"


def layers_owner(layers: Sequence[str]) -> int:
    """The host user who owns the layers and whom programs are mapped to; STRANGER without layers. Raises BadRequest."""
    owners = {os.stat(layer).st_uid for layer in layers}
    if len(owners) > 1:
        raise BadRequest(
            f"layers: they belong to several users ({', '.join(map(str, sorted(owners)))}), and gVisor can show one of them as the "
            "programs' own; give them one owner",
            field="layers",
        )
    return owners.pop() if owners else STRANGER


def mappings(owner: int) -> list[dict[str, int]]:
    """Users of the sandbox -> users of the host, for a sandbox started by root. The sandbox's root is nobody outside, and programs are
    `owner`. The host's root is mapped as well, so that places only root may enter on the host (an interpreter in its home) can be shown.
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
    """The contents of config.json. `owner` is None if root does not start the sandbox, in which case no other user can be mapped into it.
    `covers` lists paths to mount over what is shown, each with its place in the sandbox.
    """
    mounts: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    mounts += [_bind(source, seen) for source, seen in ground.shown()]
    mounts += [_bind(source, seen) for seen, source in spec.mounts.items()]
    mounts += [_bind(source, seen) for source, seen in covers]
    mounts += [_tmpfs("/.box", "size=4m", "mode=700", f"uid={INIT}", f"gid={INIT}")]
    mounts += [_bind(ground.place / "code", "/.box/code")]
    mounts += [_bind(layer, f"/.box/layers/{number}") for number, layer in enumerate(spec.layers)]
    mounts += [_tmpfs(seen) for seen in ("/tmp", "/dev/shm", spec.workdir)]  # pid 1 mounts its own over them
    rights = [f"CAP_{name}" for name in _CAPABILITIES]
    namespaces = [{"type": name} for name in ("pid", "mount", "ipc", "uts", "network")]
    mapped = mappings(owner) if owner is not None else []
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": INIT, "gid": INIT},
            "args": [python_inside(), "-s", "-S", "-P", "-B", "-c", _RUN],
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), rights),
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096}],
        },
        "root": {"path": str(ground.root), "readonly": True},
        "hostname": "workspace",
        "mounts": mounts,
        "linux": {
            "namespaces": [*namespaces, {"type": "user"}] if mapped else namespaces,
            **({"uidMappings": mapped, "gidMappings": mapped} if mapped else {}),
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
    "a living sandbox cannot be copied",
    "no memory cgroup: a watch in the sandbox keeps the limit",
)


class GVisorBoxes:
    """A `Backend` whose sandboxes have gVisor as their kernel, on this machine. Raises BadConfig where runsc is not installed."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        runsc = shutil.which("runsc")
        if runsc is None:
            raise BadConfig(_INSTALL)
        self._runsc = runsc
        self._lock = asyncio.Lock()
        self._places = SandboxPlaces[GVisorBox](self.config.boxes)
        self._ground: Ground | None = None
        self.platform = ""
        self._mended = False

    async def isolation(self) -> Isolation:
        await self._opened()
        missing = _MISSING
        if self._mended:
            missing += (
                "this runsc is from before 2023: a preloaded library makes up for a flag of statx that it refuses",
            )
        if os.getuid() != 0:
            missing += ("not started by root: programs see themselves as root, without root's rights",)
        return Isolation(kind="gvisor", forks=False, counts_memory=False, missing=missing)

    async def _opened(self) -> Ground:
        """The ground, once a first sandbox has shown that sandboxes work here. Raises SandboxRefused."""
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
            self._mended = not box.report["statx"]
            if self._mended:
                await asyncio.to_thread(ground.mend_statx)
            return
        raise SandboxRefused(f"generated code cannot be isolated here: runsc starts no sandbox ({'; '.join(refused)})")

    async def start(self, spec: SandboxSpec, *, alone: bool = False) -> GVisorBox:
        """As `Backend.start`. With `alone`, /proc is empty, so that no process of a program can inspect another."""
        check_spec(spec)
        owner = layers_owner(spec.layers)
        for source in spec.mounts.values():
            seen = os.stat(source)
            if os.getuid() == 0 and seen.st_uid != owner and seen.st_mode & 0o005 != 0o005:
                raise BadRequest(
                    f"mounts: {source!r} may not be entered by everybody, so not by programs either; chmod -R o+rX",
                    field="mounts",
                )
        ground = await self._opened()
        return await self._places.start(lambda: self._launch(spec, ground, alone=alone), spec.hosts)

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
        """One container. Raises BadRequest for files that do not fit and for what is no directory any more, Unavailable, SandboxRefused."""
        check_directories(spec)  # it may have waited for a place since its spec was checked
        owner = layers_owner(spec.layers) if os.getuid() == 0 else None
        line = GvisorConnection()
        with contextlib.ExitStack() as leaving:
            leaving.callback(line.close)
            place = leaving.enter_context(ground.box())
            ports = Ports(place / "ports")
            leaving.callback(ports.close)
            covers = await asyncio.to_thread(lambda: list(ground.covers(spec.mounts))) if owner == 0 else []
            (place / "config.json").write_text(json.dumps(configuration(spec, ground, owner, covers)))
            errors = os.open(place / "errors", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            leaving.callback(os.close, errors)
            process = await asyncio.create_subprocess_exec(
                *self._command(ground, place), stdin=line.theirs.fileno(), stdout=ports.theirs.fileno(), stderr=errors,
                env={"PATH": os.environ.get("PATH", os.defpath)}, cwd="/", start_new_session=True,
            )  # fmt: skip
            ports.sent()
            await line.sent()
            box = GVisorBox(spec, line, ports, process, place, environment_of(spec))
            try:
                box.report = await self._said(spec, line, owner, alone=alone)
            except Unavailable as error:
                await box.stop()
                told = os.pread(errors, 1500, max(0, os.fstat(errors).st_size - 1500)).decode(errors="replace").strip()
                raise Unavailable(f"{error}: {told or 'runsc said nothing'}") from error
            except BaseException:
                await box.stop()
                raise
            box.on_stop.append(leaving.pop_all().close)
        return box

    async def _said(
        self, spec: SandboxSpec, line: GvisorConnection, owner: int | None, *, alone: bool
    ) -> dict[str, Any]:
        filter = (await asyncio.to_thread(system_call_filter)).hex()
        files = await asyncio.to_thread(pack_files, spec.files)
        user = 0 if owner is None else INSIDE  # if root did not start it, only its root is the owner of our files
        said = await build_sandbox(spec, line, files, owner=user, alone=alone, filter=filter, within=_START_S)
        if said["error"]:
            raise Unavailable(f"the sandbox could not be built: step {said.get('step')!r}: {said.get('told')}")
        return said

    async def close(self) -> None:
        await self._places.close()
        async with self._lock:
            if self._ground is not None:
                await asyncio.to_thread(self._ground.close)
                self._ground = None


# ---------------------------------------------------------------- single runs, each in a sandbox that a backend starts for it


class IsolatingBackend(Protocol):
    """A backend that can hide processes from each other."""

    async def start(self, spec: SandboxSpec, *, alone: bool = False) -> Sandbox:
        """As `Backend.start`. With `alone`, there is no /proc."""
        ...


class RunsInBoxes:
    r"""The counterpart of `SingleRuns` for other backends, slower by the start of a sandbox and of an interpreter. The caller owns the
    backend. There is no /proc here either: through it, graded code could read its judge's input. `python` is an interpreter in the
    sandbox, or "" for this machine's own, which is shown there.
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
        """Run Python source, or an argv with an absolute path, in a fresh sandbox, where `files` lie in the working directory.

        Raises BadRequest for a file name that leads out of it, SandboxRefused, Unavailable.
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
