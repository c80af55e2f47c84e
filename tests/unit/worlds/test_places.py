"""Places for sandboxes: as many at once as are allowed, each given back once, and a proxy that ends with its sandbox."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import Unavailable
from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.sandbox import proxy
from ostinato.worlds.sandbox.e2b.backend import E2BBox, E2BBoxes
from ostinato.worlds.sandbox.gvisor.backend import GVisorBox
from ostinato.worlds.sandbox.gvisor.line import GvisorConnection
from ostinato.worlds.sandbox.proxy import OpenSandboxes


class FakeBox:
    def __init__(self, refusal=None):
        self.on_stop, self.ports, self.stops = [], [], 0
        self.refusal, self.listener = refusal, None

    async def listen(self, port):
        self.ports.append(port)
        if self.refusal is not None:
            raise self.refusal
        self.listener = socket.socket(socket.AF_INET)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        return self.listener

    async def stop(self):
        self.stops += 1
        on_stop, self.on_stop = self.on_stop, []
        for call in on_stop:
            call()


def launching(box):
    async def launch():
        if isinstance(box, BaseException):
            raise box
        return box

    return launch


async def starts_at_once(places):
    async with asyncio.timeout(PATIENT_S):
        return await places.start(launching(FakeBox()), ())


async def test_one_more_waits_until_a_place_is_given_back():
    places = OpenSandboxes(2)
    first, _ = [await places.start(launching(FakeBox()), ()) for _ in range(2)]
    launched = asyncio.Event()

    async def launch():
        launched.set()
        return FakeBox()

    third = asyncio.create_task(places.start(launch, ()))
    await asyncio.sleep(0.02)
    assert not launched.is_set()
    await first.stop()
    await first.stop()
    await third
    with pytest.raises(TimeoutError):  # the second stop gave nothing back
        await asyncio.wait_for(places.start(launching(FakeBox()), ()), 0.05)


@pytest.mark.parametrize("error", [Unavailable("no"), asyncio.CancelledError()])
async def test_what_does_not_start_takes_no_place(error):
    places = OpenSandboxes(1)
    with pytest.raises(type(error)):
        await places.start(launching(error), ())
    await starts_at_once(places)


async def test_a_way_out_that_cannot_be_had_ends_the_sandbox():
    places, box = OpenSandboxes(1), FakeBox(refusal=Unavailable("port 3128"))
    with pytest.raises(Unavailable, match="3128"):
        await places.start(launching(box), ("pypi.org:443",))
    assert box.stops == 1
    await starts_at_once(places)


async def test_a_proxy_that_cannot_start_leaves_no_socket_open(monkeypatch):
    async def refuse(*_, **__):
        raise OSError("no")

    monkeypatch.setattr(asyncio, "start_server", refuse)
    places, box = OpenSandboxes(1), FakeBox()
    with pytest.raises(OSError, match="no"):
        await places.start(launching(box), ("pypi.org:443",))
    assert box.stops == 1
    assert box.listener.fileno() == -1
    await starts_at_once(places)


async def test_the_proxy_answers_while_its_sandbox_lives():
    places, box = OpenSandboxes(1), FakeBox()
    await places.start(launching(box), ("pypi.org:443",))
    address = box.listener.getsockname()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"CONNECT example.org:443 HTTP/1.1\r\n\r\n")
    assert b"403" in await reader.readline()
    writer.close()
    await box.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def test_without_hosts_no_port_is_taken():
    box = await OpenSandboxes(1).start(launching(FakeBox()), ())
    assert box.ports == []


async def test_closing_stops_all_that_are_open():
    places = OpenSandboxes(3)
    boxes = [await places.start(launching(FakeBox()), ()) for _ in range(3)]
    await boxes[0].stop()
    await places.close()
    assert [box.stops for box in boxes] == [1, 1, 1]


class Endless:
    """A machine that is never ended, and a process that never ends."""

    name, returncode = "m", None

    async def kill(self):
        await asyncio.Event().wait()

    wait = kill


@pytest.mark.parametrize("kind", ["e2b", "gvisor"])
async def test_a_stop_that_is_cancelled_gives_the_place_back(kind, tmp_path):
    line, given_back = GvisorConnection(), []
    made = {
        "e2b": lambda: E2BBox(SandboxSpec(), Endless(), line, {}, set()),
        "gvisor": lambda: GVisorBox(SandboxSpec(), line, None, Endless(), tmp_path, {}),
    }
    box = made[kind]()
    box.on_stop.append(lambda: given_back.append(1))
    stopping = asyncio.create_task(box.stop())
    await asyncio.sleep(0.01)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    assert given_back == [1]


class Slow:
    """A machine whose end takes until `go`."""

    name = "m"

    def __init__(self):
        self.asked, self.go, self.left, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event(), False

    async def kill(self):
        self.asked.set()
        try:
            await self.go.wait()
            self.ended = True
        finally:
            self.left.set()


async def test_a_stop_that_is_cancelled_ends_its_machine_all_the_same():
    machine = Slow()
    stopping = asyncio.create_task(E2BBox(SandboxSpec(), machine, GvisorConnection(), {}, set()).stop())
    async with asyncio.timeout(PATIENT_S):
        await machine.asked.wait()
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        machine.go.set()
        await machine.left.wait()
    assert (stopping.cancelled(), machine.ended) == (True, True)


async def test_closing_waits_for_the_end_of_machines_whose_stop_was_cancelled(monkeypatch):
    """Else the program's end would cancel it."""
    machine, boxes = Slow(), E2BBoxes(environment={"E2B_API_KEY": "key"})
    stopping = asyncio.create_task(E2BBox(SandboxSpec(), machine, GvisorConnection(), {}, boxes._ending).stop())
    async with asyncio.timeout(PATIENT_S):
        await machine.asked.wait()
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        closing = asyncio.create_task(boxes.close())
        await asyncio.sleep(0.01)
        waits = not closing.done()
        machine.go.set()
        await closing
    assert (waits, machine.ended, boxes._ending) == (True, True, set())


async def test_a_stop_that_is_cancelled_twice_leaves_no_file_open():
    machine, leaving = Slow(), asyncio.Event()
    box = E2BBox(SandboxSpec(), machine, GvisorConnection(), {}, set())

    async def left():
        leaving.set()
        await asyncio.Event().wait()

    box.wire.wait_closed = left
    stopping = asyncio.create_task(box.stop())
    async with asyncio.timeout(PATIENT_S):
        await machine.asked.wait()
        stopping.cancel()
        await leaving.wait()
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        machine.go.set()
        await machine.left.wait()
    assert not Path(box._ports).exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(box._place)


async def test_a_program_cannot_open_more_ways_out_than_it_may(monkeypatch):
    monkeypatch.setattr(proxy, "MAX_CONNECTIONS", 3)
    places, box = OpenSandboxes(1), FakeBox()
    await places.start(launching(box), ("pypi.org:443",))
    async with asyncio.timeout(PATIENT_S):
        opened = [await asyncio.open_connection(*box.listener.getsockname()) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*box.listener.getsockname())
        assert await reader.read() == b"", "one too many is closed"
        writer.close()
        opened[0][1].close()
        await opened[0][1].wait_closed()
        status = b""
        while b"403" not in status:  # its place is given back once its end has arrived
            reader, writer = await asyncio.open_connection(*box.listener.getsockname())
            writer.write(b"CONNECT example.org:443 HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                status = await reader.readline()
            writer.close()
    await box.stop()
    for _, writer in opened:
        writer.close()
