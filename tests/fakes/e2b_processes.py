"""envd's process service for the machines of the fake E2B server. Imported only where the SDK is installed."""

import base64

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import Process
from protobuf import Oneof
from tests.fakes.e2b_server import end_process


class Processes(Process):
    """The part of the service that the SDK uses here."""

    def __init__(self, server):
        self._server = server

    def _machine(self, ctx):
        return self._server.machines[ctx.request_headers["e2b-sandbox-id"]]

    def _running(self, request, ctx):
        found = self._machine(ctx).running.get(request.process.selector.value)
        if found is None or found.process.returncode is not None:
            raise ConnectError(Code.NOT_FOUND, "no such process")
        return found

    async def start(self, request, ctx):
        user = base64.b64decode(ctx.request_headers["authorization"].removeprefix("Basic ")).decode()
        if user != "root:":
            raise ConnectError(Code.UNAUTHENTICATED, f"no such user {user!r}")
        config = request.process
        running = await self._machine(ctx).spawn([config.cmd, *config.args], dict(config.envs))
        async for event in self._listen(running, running.process.pid):
            yield pb.StartResponse(event=event)

    async def connect(self, request, ctx):
        running = self._running(request, ctx)
        async for event in self._listen(running, running.process.pid):
            yield pb.ConnectResponse(event=event)

    async def _listen(self, running, pid):
        listener = running.listen()
        yield pb.ProcessEvent(event=Oneof("start", pb.ProcessEvent.StartEvent(pid=pid)))
        while True:
            kind, found = await listener.get()
            if kind == "broken":
                raise ConnectError(Code.UNAVAILABLE, "the connection to the sandbox ended before the stream completed")
            if kind == "end":
                end = pb.ProcessEvent.EndEvent(exit_code=found, exited=True, status=f"exit status {found}")
                yield pb.ProcessEvent(event=Oneof("end", end))
                return
            yield pb.ProcessEvent(event=Oneof("data", pb.ProcessEvent.DataEvent(output=Oneof(kind, found))))

    async def send_input(self, request, ctx):
        running = self._running(request, ctx)
        if self._server.refuse_inputs:
            self._server.refuse_inputs -= 1
            raise ConnectError(Code.UNAVAILABLE, "upstream connect error")
        data = request.input.input.value
        running.sent.append(len(data))
        running.process.stdin.write(data)
        await running.process.stdin.drain()
        if self._server.lose_answers:
            self._server.lose_answers -= 1
            raise ConnectError(Code.UNAVAILABLE, "upstream connect error")
        return pb.SendInputResponse()

    async def send_signal(self, request, ctx):
        self._running(request, ctx)
        end_process(request.process.selector.value)
        return pb.SendSignalResponse()
