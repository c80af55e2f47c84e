"""A fork server: workers that begin with their libraries imported, which costs a fresh process several seconds of computing.

It stands in for asyncio's way to start a process (`ostinato.launch.placing.process.spawn`). What is not a worker of this installation, or
has other settings of its libraries in its environment, is started as usual.
"""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback

from ostinato.launch.placing.process import THREADS
from ostinato.launch.placing.sign import LISTEN_FD, PARENT, PULSE_FD

LIBRARIES = (
    "ostinato.cli.commands",
    *(f"ostinato.launch.workers.{name}" for name in ("serve", "train", "release", "rollout", "housekeeping")),
    *("ostinato.model.load", "ostinato.model.renderer", "ostinato.engine.embedded.engine", "ostinato.model.selftest"),
)
_READ_AT_IMPORT = (
    "ATEN",
    "HF_",
    "LD_",
    "MKL",
    "NUMBA",
    "OMP",
    "ONEDNN",
    "PYTHON",
    "TORCH",
    "TRANSFORMERS",
    "TRITON",
    "XDG",
)
_REQUEST = 1 << 18  # bytes


class Forked:
    """A forked process, with what its supervisor uses of asyncio's."""

    def __init__(self, reports: int) -> None:
        self.pid, self.returncode, self._reports, self._rest = 0, None, reports, b""
        self.begun, self._ended = asyncio.Event(), asyncio.Event()
        os.set_blocking(reports, False)
        asyncio.get_running_loop().add_reader(reports, self._read)

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def _read(self) -> None:
        part = os.read(self._reports, 64)
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            what, number = line.split()
            if what == b"begun":
                self.pid = int(number)
                self.begun.set()
            else:
                self.returncode = int(number)
        if not part:
            asyncio.get_running_loop().remove_reader(self._reports)
            os.close(self._reports)
            self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode  # the server was ended
            self.begun.set()
            self._ended.set()


class ForkServer:
    """Starts the server, with these libraries, with the first worker, a process of `python -m MODULE`. `close` ends it, and with it all
    workers that still run.
    """

    def __init__(self, module: str = "ostinato.cli", libraries=LIBRARIES) -> None:
        self._process, self._socket = None, None
        self._own, self._libraries = (sys.executable, "-m", module), libraries
        self._environment = settings_of(os.environ | THREADS)

    async def spawn(self, *argv, cwd, stdin, stdout, stderr, env, pass_fds, start_new_session):
        """As asyncio.create_subprocess_exec, with what a supervisor passes to it."""
        if tuple(argv[:3]) != self._own or settings_of(env) != self._environment:
            return await asyncio.create_subprocess_exec(
                *argv,
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                pass_fds=pass_fds,
                start_new_session=start_new_session,
            )
        if self._process is None:
            self._start()
        request = {"words": argv[3:], "cwd": str(cwd or os.getcwd()), "env": dict(env), "fds": list(pass_fds)}
        ours, theirs = os.pipe()
        try:
            data, fds = json.dumps(request).encode(), [theirs, stdout.fileno(), *pass_fds]
            await asyncio.to_thread(socket.send_fds, self._socket, [data], fds)  # it may still import
        finally:
            os.close(theirs)
        forked = Forked(ours)
        await forked.begun.wait()
        return forked

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        begin = f"serve({theirs.fileno()}, {self._own[2]!r}, {self._libraries!r})"
        command = [sys.executable, "-c", f"from tests.fakes.fork_server import serve; {begin}"]
        environment = os.environ | THREADS | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait()
            self._process = None


def settings_of(environment) -> dict[str, str]:
    """What libraries read of an environment when they are imported."""
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}


def serve(number: int, module: str, libraries) -> None:
    """The server's process: forks a worker for each request, and reports its end. Ends when nobody can ask any more."""
    for name in (*libraries, module):
        importlib.import_module(name)
    gc.freeze()
    requests, (woken, wake) = socket.socket(fileno=number), os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            _reap(children)
        if requests in ready:
            data, fds, _, _ = socket.recv_fds(requests, _REQUEST, 16)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                _work(module, json.loads(data), fds)
            reports, *others = fds
            for fd in others:
                os.close(fd)
            children[pid] = reports


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        reports = children.pop(pid)
        _report(reports, "ended", os.waitstatus_to_exitcode(status))
        os.close(reports)


def _report(reports: int, what: str, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        os.write(reports, f"{what} {number}\n".encode())


def _work(module, request, fds) -> None:
    """The worker's process, as if it had been started with `python -m MODULE`."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        reports, output, *passed = fds
        _report(reports, "begun", os.getpid())  # with a group of its own, to which a signal may be sent
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, place in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(fd, place)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in passed:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        environment, numbers = request["env"], dict(zip(map(str, request["fds"]), map(str, passed), strict=True))
        environment[PARENT] = str(os.getppid())
        for name in (PULSE_FD, LISTEN_FD):
            if name in environment:
                environment[name] = numbers[environment[name]]
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(request["cwd"])
        sys.argv = [module, *request["words"]]
        importlib.import_module(module).main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (as the interpreter does)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
