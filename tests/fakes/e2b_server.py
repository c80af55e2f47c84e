"""A fake E2B server for tests: the REST interface, and envd's processes and files for each machine, as the SDK uses them."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

KEY = "e2b_5ec4e7000000000000000000000000000000beef"
_SCRIPT = Path(__file__).with_name("e2b_machine.py")


def cannot_run() -> str:
    """Why the server cannot run here, or "" if it can."""
    try:
        import e2b  # noqa: F401
    except ImportError:
        return "E2B's SDK is not installed: pip install 'ostinato[e2b]'"
    if os.geteuid() != 0 or shutil.which("nsenter") is None:
        return "the machines of the fake E2B server need root and nsenter"
    return ""


@contextlib.asynccontextmanager
async def e2b_server(monkeypatch):
    """A running server, to which the SDK's environment variables point. The test is skipped where it cannot run."""
    if why := cannot_run():
        pytest.skip(why)
    server = E2BServer()
    await server.start()
    for name, value in {
        "E2B_API_KEY": KEY, "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_CONNECTION_RETRIES": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        yield server
    finally:
        await server.close()


class Machine:
    """A sandbox as the server knows it. `timeout` is the last value set, `created` the request that created it."""

    def __init__(self, created):
        self.name = f"i{uuid.uuid4().hex[:16]}"
        self.created, self.timeout = created, created.get("timeout")
        self.kept = 0
        self.running = {}
        self._process = None
        self.pid = 0

    async def start(self):
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", _SCRIPT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = int(await self._process.stdout.readline())
        assert await self._process.stdout.readline() == b"ready\n"

    async def kill(self):
        self._process.stdin.close()
        await self._process.wait()
        for each in list(self.running.values()):
            await each.process.wait()

    def path(self, path):
        return Path(f"/proc/{self.pid}/root{path}")

    async def spawn(self, argv, env):
        enter = [
            "nsenter",
            f"--target={self.pid}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
            "--",
        ]
        process = await asyncio.create_subprocess_exec(
            *enter, *argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": "/root", "USER": "root", **env}, limit=1 << 20,
        )  # fmt: skip
        started = Running(process)
        self.running[process.pid] = started
        return started


class Running:
    """A command. Each listener has a queue. Output printed without a listener is lost, as with envd."""

    def __init__(self, process):
        self.process = process
        self.listeners = []
        self.sent = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self):
        async def drain(stream, kind):
            while data := await stream.read(32 << 10):
                for listener in self.listeners:
                    listener.put_nowait((kind, data))

        await asyncio.gather(drain(self.process.stdout, "stdout"), drain(self.process.stderr, "stderr"))
        code = await self.process.wait()
        for listener in self.listeners:
            listener.put_nowait(("end", code))

    def listen(self):
        listener = asyncio.Queue()
        self.listeners.append(listener)
        return listener

    def break_off(self):
        """Break every listening connection."""
        for listener in self.listeners:
            listener.put_nowait(("broken", None))
        self.listeners = []


class E2BServer:
    """The server. `answers`: path -> (status, body) to answer instead. `machines`: running ones by name; `ended`: the ended ones."""

    def __init__(self):
        self.machines, self.ended = {}, []
        self.answers = {}
        self.asked = []
        self.refuse_inputs = 0  # the number of inputs to refuse; `lose_answers`: to pass on without an answer
        self.lose_answers = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    async def start(self):
        self._server = uvicorn.Server(uvicorn.Config(self._application(), port=0, log_level="critical", lifespan="off"))
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]

    async def close(self):
        for machine in list(self.machines.values()):
            await self.end(machine)
        self._server.should_exit = self._server.force_exit = True
        await self._serving

    async def end(self, machine):
        """End a machine."""
        self.machines.pop(machine.name, None)
        self.ended.append(machine)
        await machine.kill()

    def _application(self):
        from e2b.envd.process.process_connect import ProcessASGIApplication
        from tests.fakes.e2b_processes import Processes

        processes = ProcessASGIApplication(Processes(self))
        routes = [
            Route("/v2/sandboxes", self._create, methods=["POST"]),
            Route("/sandboxes/{name}", self._delete, methods=["DELETE"]),
            Route("/sandboxes/{name}/timeout", self._timeout, methods=["POST"]),
            Route("/files", self._files, methods=["POST"]),
            Route("/health", self._health),
            Mount("/", app=processes),
        ]
        return Guard(Starlette(routes=routes), self)

    async def _create(self, request):
        machine = Machine(await request.json())
        if machine.created["templateID"] != "base":
            return JSONResponse({"code": 404, "message": f"template '{machine.created['templateID']}' not found"}, 404)
        await machine.start()
        self.machines[machine.name] = machine
        return JSONResponse(
            {"templateID": "base", "sandboxID": machine.name, "clientID": "c", "envdVersion": "0.6.7", "envdAccessToken": "token"}, 201
        )  # fmt: skip

    async def _delete(self, request):
        machine = self.machines.get(request.path_params["name"])
        if machine is None:
            return JSONResponse({"code": 404, "message": "no such sandbox"}, 404)
        await self.end(machine)
        return Response(status_code=204)

    async def _timeout(self, request):
        machine = self.machines.get(request.path_params["name"])
        if machine is None:
            return JSONResponse({"code": 404, "message": "no such sandbox"}, 404)
        machine.timeout = (await request.json())["timeout"]
        machine.kept += 1
        return Response(status_code=204)

    async def _files(self, request):
        machine = self.machines[request.headers["e2b-sandbox-id"]]
        assert request.query_params["username"] == "root"
        assert request.headers["content-type"] == "application/octet-stream"
        path = machine.path(request.query_params["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            async for part in request.stream():
                file.write(part)
        return JSONResponse([{"name": path.name, "path": request.query_params["path"], "type": "file"}])

    async def _health(self, request):
        return Response(status_code=204)


class Guard:
    """In front of all routes: checks the key, refuses ended machines, and gives the answers that a test has set."""

    def __init__(self, inner, server):
        self._inner, self._server = inner, server

    async def __call__(self, scope, receive, send):
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = scope["path"]
        self._server.asked.append((scope["method"], path, headers))
        answer = next((told for part, told in self._server.answers.items() if part in path), None)
        machine = headers.get("e2b-sandbox-id")
        if answer is not None:
            inner = Response(answer[1], answer[0], {"Should-Retry": "false"}, media_type="application/json")
        elif "sandboxes" in path and headers.get("x-api-key") != KEY:
            inner = JSONResponse({"code": 401, "message": f"no such key: {headers.get('x-api-key')}"}, 401)
        elif machine is not None and machine not in self._server.machines:
            inner = JSONResponse({"sandboxId": machine, "message": "The sandbox was not found", "code": 502}, 502)
        elif machine is not None and headers.get("x-access-token") != "token":
            inner = JSONResponse({"code": 401, "message": "no token"}, 401)
        else:
            inner = self._inner
        await inner(scope, receive, send)


def end_process(pid):
    """Send SIGKILL to the process that `nsenter` started."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
