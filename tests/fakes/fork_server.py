"""A fork server: programs that begin with their libraries imported, which costs a fresh process several seconds of computing.

It stands in for asyncio's way to start a process (`ostinato.launch.placing.process.spawn`), and for `subprocess.Popen`. What is not
`python -m MODULE` or `python -c CODE`, or has other settings of its libraries in its environment, is started as usual.
"""

import asyncio
import contextlib
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path

from ostinato.launch.placing import process
from ostinato.launch.placing.heartbeat import PARENT
from ostinato.launch.placing.process import THREADS
from ostinato.launch.placing.warm_process import move_descriptors, reopened

LIBRARIES = (
    "ostinato.cli.commands",
    *(f"ostinato.launch.workers.{name}" for name in ("serve", "train", "release", "rollout", "housekeeping")),
    *(f"ostinato.model.{name}" for name in ("load", "renderer", "selftest")),
    *("ostinato.engine.embedded.engine", "ostinato.train.sharding.trainer"),
)
OF_TESTS = ("anthropic", "openai", "scipy.stats")
"""What only the workers of pytest-xdist import, for 1.5 s of processor time each."""
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
_IGNORED = {
    "PYTHONPATH",
    "TORCHINDUCTOR_CACHE_DIR",
}  # the forked process applies the one; torch sets the other when imported
_REQUEST, _REPORT = 1 << 18, 8  # bytes
_FORKS = "OSTINATO_TEST_FORKS"
SHARED = "OSTINATO_TEST_FORK_SERVER"
_SERVERS = itertools.count()


class Forked:
    """A forked process, with what its supervisor uses of asyncio's."""

    def __init__(self, reports: int) -> None:
        self.pid, self.returncode, self._reports = 0, None, reports
        self.begun, self._ended = asyncio.Event(), asyncio.Event()
        asyncio.get_running_loop().add_reader(reports, self._read)

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def _read(self) -> None:
        number = _reported(self._reports)
        if number is not None and not self.begun.is_set():
            self.pid = number
            self.begun.set()
            return
        asyncio.get_running_loop().remove_reader(self._reports)
        os.close(self._reports)
        self.returncode = -signal.SIGKILL if number is None else number
        self.begun.set()
        self._ended.set()


class Program(subprocess.Popen):
    """A forked process, with the interface of one that was started: only its start, and how its end is heard of, are other ones."""

    def __init__(self, server: "ForkServer", command, **options) -> None:
        self._server = server
        super().__init__(command, **options)

    def _execute_child(self, *given) -> None:
        command, passed, cwd, env, pipes = given[0], given[4], given[5], given[6], given[10:16]
        streams = (own if fd == -1 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5])))
        try:
            self._reports = self._server.ask(command, cwd, env, streams, passed)
            weakref.finalize(self, os.close, self._reports)
            self.pid = _reported(self._reports)
            if self.pid is None:
                raise ChildProcessError("the fork server has ended")
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self._wait(None)
        return self.returncode

    def _wait(self, timeout):
        patience = None if timeout is None else max(0.0, timeout)  # `communicate` may have used up more
        if self.returncode is None and not select.select([self._reports], [], [], patience)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout)
        with self._waitpid_lock:
            if self.returncode is None:
                code = _reported(self._reports)
                self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode


class ForkServer:
    """Starts the server, with these libraries, with the first program. `close` ends it, and with it all programs that still run."""

    def __init__(self, libraries=LIBRARIES) -> None:
        self._process, self._socket, self._libraries, self._starting = None, None, libraries, threading.Lock()
        self._address = ""
        self._environment = settings_of(os.environ | THREADS)

    def popen(self, command, *, env=None, forks=False, **options) -> subprocess.Popen:
        """As subprocess.Popen, but `env` is added to this process's environment, and the program computes with one thread.

        `forks`: if it supervises workers, they are forked, too. They then die with the server, and not with the program that is killed.
        """
        command, env = [str(word) for word in command], {**os.environ, **THREADS, **(env or {})}
        if self._forks(command, env):
            return Program(self, command, env={**env, **({_FORKS: "1"} if forks else {})}, **options)
        return subprocess.Popen(command, env=env, **options)

    def run(self, command, *, timeout=None, **options) -> subprocess.CompletedProcess:
        """As subprocess.run, with what is said as text."""
        with self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as program:
            try:
                said = program.communicate(timeout=timeout)
            except BaseException:
                program.kill()
                raise
        return subprocess.CompletedProcess(program.args, program.returncode, *said)

    async def spawn(self, *argv, cwd, stdin, stdout, stderr, env, pass_fds, start_new_session):
        """As asyncio.create_subprocess_exec, with what a supervisor passes to it."""
        if not self._forks(argv, env):
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
        # in a thread, because the server may still import
        forked = Forked(await asyncio.to_thread(self._ask_silent, argv, cwd, env, stdout.fileno(), pass_fds))
        await forked.begun.wait()
        return forked

    def _ask_silent(self, command, cwd, env, output, passed) -> int:
        with open(os.devnull) as nothing:
            return self.ask(command, cwd, env, (nothing.fileno(), output, output), passed)

    def ask(self, command, cwd, env, streams, passed) -> int:
        """Have a program forked with these three streams and other files; returns where its beginning and its end are reported."""
        request = {"command": command[1:], "cwd": str(cwd or os.getcwd()), "env": dict(env), "fds": list(passed)}
        ours, theirs = os.pipe()
        try:
            self._send([json.dumps(request).encode()], [theirs, *streams, *passed])
        finally:
            os.close(theirs)
        return ours

    def _send(self, request, files) -> None:
        self.start()
        socket.send_fds(self._socket, request, files)

    def _forks(self, command, env) -> bool:
        is_program = tuple(command[:2]) in ((sys.executable, "-m"), (sys.executable, "-c"))
        return is_program and settings_of(env) == self._environment

    def start(self, more=()) -> str:
        """Start the server unless it runs, with more libraries. Returns the address at which other processes may ask it (`OtherServer`)."""
        with self._starting:
            if self._process is None:
                self._libraries += more
                self._start()
        return self._address

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._address = f"ostinato forks {os.getpid()} {next(_SERVERS)}"
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as others:
            others.bind(f"\0{self._address}")
            others.listen()  # before it imports: who asks meanwhile waits
            passed = [theirs.fileno(), others.fileno()]
            begin = f"serve({passed[0]}, {passed[1]}, {self._libraries!r})"
            command = [sys.executable, "-c", f"from tests.fakes.fork_server import serve; {begin}"]
            environment = os.environ | THREADS | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self._process = subprocess.Popen(command, pass_fds=passed, env=environment, start_new_session=True)

    def close(self) -> None:
        if self._process is not None:
            self._socket.shutdown(socket.SHUT_RDWR)  # also where a copy of this process has it
            self._socket.close()
            self._process.wait()
            self._process = None


class OtherServer(ForkServer):
    """A server that another process started, at its address."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def start(self, _more=()) -> str:
        return self._address

    def _send(self, request, files) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(f"\0{self._address}")
            socket.send_fds(line, request, files)


def settings_of(environment) -> dict[str, str]:
    """What libraries read of an environment when they are imported."""
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT) and name not in _IGNORED
    }


def serve(number: int, listening: int, libraries) -> None:
    """The server's process: forks a program for each request, and reports its end. Ends when the process that started it does.

    Any other process of this user may ask on the socket `listening`, with one request a connection.
    """
    for name in libraries:
        importlib.import_module(name)
    load_kernels()
    gc.freeze()
    requests, others, (woken, wake) = socket.socket(fileno=number), socket.socket(fileno=listening), os.pipe()
    address = others.getsockname()[1:].decode()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, others, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            _reap(children)
        if requests in ready and not _forked(requests, address, children):
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if others in ready:
            with others.accept()[0] as line:
                _forked(line, address, children)


def load_kernels() -> None:
    """Load our kernels from the user's cache, as each program that computes would for half a second. None is compiled or run."""
    if "numba" not in sys.modules:
        return
    from numba.core.dispatcher import Dispatcher

    for name, module in list(sys.modules.items()):
        kernels = vars(module).values() if name.startswith("ostinato.") else ()
        for kernel in [each for each in kernels if isinstance(each, Dispatcher) and each.py_func.__module__ == name]:
            context, cache = kernel.targetctx, kernel._cache
            context.refresh()  # numba's own declarations, before its first kernel
            if (file := getattr(cache, "_cache_file", None)) is None:
                continue  # a helper that is compiled into others
            for key in file._load_index():
                if key == cache._index_key(key[0], context.codegen()):  # else it is another kind of CPU's
                    kernel.compile(key[0])


def _forked(line: socket.socket, address: str, children: dict[int, int]) -> bool:
    """Fork the program that is asked for on this line. False if its other end is closed."""
    data, fds, _, _ = socket.recv_fds(line, _REQUEST, 16)
    if data:
        pid = os.fork()
        if pid == 0:
            _work(json.loads(data), fds, address)
        children[pid], *others = fds
        for fd in others:
            os.close(fd)
    return bool(data)


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        reports = children.pop(pid)
        _report(reports, os.waitstatus_to_exitcode(status))
        os.close(reports)


def _report(reports: int, number: int) -> None:
    """The process's id when it begins, its exit code when it ends."""
    with contextlib.suppress(OSError):  # nobody waits for it any more
        os.write(reports, number.to_bytes(_REPORT, "little", signed=True))


def _reported(reports: int) -> int | None:
    """The next report; None if the server was ended."""
    part = os.read(reports, _REPORT)
    return int.from_bytes(part, "little", signed=True) if part else None


def _work(request, fds, address) -> None:
    """The program's process, as if it had been started with the command."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        reports, *files = fds
        _report(reports, os.getpid())  # with a group of its own, to which a signal may be sent
        _place(files, [0, 1, 2, *request["fds"]])
        sys.stdout, sys.stderr = reopened(sys.stdout), reopened(sys.stderr)
        environment = request["env"]
        forks = environment.pop(_FORKS, "")
        if PARENT in environment:
            environment[PARENT] = str(os.getppid())
        os.environ.clear()
        os.environ.update(environment)
        globals()["FORK_SERVER"] = _of_these_tests()  # this module was imported before the server had an address
        more = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in more if path and path not in sys.path]
        os.chdir(request["cwd"])
        if forks:
            process.spawn = OtherServer(address).spawn
        _customise(more)
        _run(*request["command"])
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (as the interpreter does)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _customise(path) -> None:
    """What the interpreter runs first of all, if a test wrote it."""
    for folder in filter(None, path):
        if (file := Path(folder) / "sitecustomize.py").is_file():
            exec(compile(file.read_text(), file, "exec"), {"__name__": "sitecustomize"})
            return


def _place(files, numbers) -> None:
    """Give the files these numbers, and close all others."""
    move_descriptors(files, numbers)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in numbers:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _run(how, what, *words) -> None:
    sys.argv = ["-c", *words]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(what, "<string>", "exec"), vars(main))


def python(address: str, words: list[str]) -> int:
    """What `python WORDS` does, forked by the server at that address, with this process's streams and signals. Returns its exit code.

    It is for whoever starts a program by the interpreter's name: pytest-xdist its workers.
    """
    command = [sys.executable, *(word for word in words if word != "-u")]
    passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until it is known whom they are for
    reports = OtherServer(address).ask(command, None, os.environ, (0, 1, 2), ())
    if (pid := _reported(reports)) is None:
        raise ChildProcessError("the fork server has ended")
    for number in passed_on:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = _reported(reports)
    return 1 if code is None else code if code >= 0 else 128 - code


def _of_these_tests() -> ForkServer:
    return OtherServer(os.environ[SHARED]) if SHARED in os.environ else ForkServer()


FORK_SERVER = _of_these_tests()
"""That of these tests. The workers of pytest-xdist share the one that the process which started them has."""

if __name__ == "__main__":
    sys.exit(python(os.environ[SHARED], sys.argv[1:]))
