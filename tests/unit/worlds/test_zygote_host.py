"""The host's side of the zygote, whose callers come at once and may give up at any time. Keeper and zygote are played here."""

import asyncio
import errno
import os
import socket

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import Unavailable
from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.sandbox import host, protocol
from ostinato.worlds.sandbox.backend import Box, Stack


class Played:
    """A zygote whose keeper answers once `answers` is set. `paths` are the layers, by their numbers."""

    def __init__(self):
        self.zygote, self.paths = host.Zygote(full=False, groups=False), []
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        ours, theirs = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)), strict=True)
        for end in (*ours, *theirs):
            end.setblocking(False)
        self.zygote._control, self.zygote._requests = ours
        self.control, self.requests = theirs
        self.keeping = asyncio.create_task(self._keep())

    async def _keep(self):
        loop = asyncio.get_running_loop()
        while path := await loop.sock_recv(self.requests, 65536):
            self.asked.set()
            await self.answers.wait()
            socket.send_fds(self.requests, [b"{}"], [self.requests.fileno()])  # any descriptor does
            await loop.sock_recv(self.control, 65536)
            self.paths.append(path.decode())
            self.control.send(str(len(self.paths) - 1).encode())

    async def close(self):
        self.keeping.cancel()
        await asyncio.gather(self.keeping, return_exceptions=True)
        self.zygote.close()
        for end in (self.control, self.requests):
            end.close()


@pytest.fixture
async def played():
    played = Played()
    yield played
    await played.close()


async def test_the_answer_to_a_caller_that_gave_up_is_not_taken_for_anothers_layer(played, tmp_path):
    first, second = (tmp_path / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    given_up = asyncio.create_task(played.zygote.layer("layers", str(first)))
    async with asyncio.timeout(PATIENT_S):
        await played.asked.wait()
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        played.answers.set()
        numbers = {str(path): await played.zygote.layer("layers", str(path)) for path in (second, first)}
    assert {path: played.paths[number] for path, number in numbers.items()} == {path: path for path in numbers}


async def test_whoever_waits_for_a_layer_is_told_if_the_zygote_is_ended(played, tmp_path):
    waiting = asyncio.create_task(played.zygote.layer("layers", str(tmp_path)))
    async with asyncio.timeout(PATIENT_S):
        await played.asked.wait()
        played.zygote.close()
        with pytest.raises(Unavailable):
            await waiting


async def test_starts_that_wait_for_room_at_the_same_time_all_go_through(played):
    room = 0
    while True:
        try:
            protocol._send_now(played.zygote._control, b"x", ())
            room += 1
        except BlockingIOError:
            break
    starts = [asyncio.create_task(played.zygote.start(b"start", ())) for _ in range(3)]
    await asyncio.sleep(0.02)
    for _ in range(room):
        assert played.control.recv(64) == b"x"
    async with asyncio.timeout(PATIENT_S):
        await asyncio.gather(*starts)
    assert [played.control.recv(64) for _ in starts] == [b"start"] * 3


async def test_a_keeper_that_does_not_start_in_time_is_unavailable(monkeypatch, tmp_path):
    (tmp_path / "zygote.py").write_text("import sys, socket; socket.socket(fileno=int(sys.argv[1])).recv(1)")
    monkeypatch.setattr(host, "_ZYGOTE", tmp_path / "zygote.py")
    monkeypatch.setattr(host, "_START_S", 0.05)
    monkeypatch.setattr(host.Zygote, "_settings", lambda self: b"{}")
    zygote = host.Zygote(full=False, groups=False)
    with pytest.raises(Unavailable, match="in time"):
        await zygote.start(b"start", ())
    assert zygote.process is None


# ---------------------------------------------------------------- a box, whose pid 1 is played


class Line:
    """Answers as `says` has it, by operation and place; never where that is None."""

    open = True

    def __init__(self, says):
        self.says = says

    def ask(self, operation, text=b"", **_):
        answer = asyncio.get_running_loop().create_future()
        if (said := self.says(operation, text)) is not None:
            code, fds = said
            answer.set_result(
                protocol.BoxReply(operation=operation, code=code, reason=0, seconds=0.0, text="", fds=fds)
            )
        return 1, answer

    def close(self):
        self.open = False


def a_box(says, ready=()):
    answer = protocol.BoxReply(operation=protocol.Operation.READY, code=0, reason=0, seconds=0.0, text="", fds=ready)
    return Box(SandboxSpec(), Stack(own=("f",), ancestors=1), Line(says), answer, {}, starter=None)


async def test_a_box_whose_stop_is_cancelled_gives_its_place_back():
    box, given_back = a_box(lambda operation, text: None), []
    box.on_stop.append(lambda: given_back.append(1))
    stopping = asyncio.create_task(box.stop())
    await asyncio.sleep(0.01)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    assert (given_back, box._line.open) == ([1], False)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_fork_that_is_cancelled_or_fails_stops_the_boxes_that_have_started(fails):
    started, given_back, others = asyncio.Event(), [], asyncio.Event()

    async def start(spec, stack, fds):
        if fds == (2,):
            await others.wait()
            raise Unavailable("no room")
        box = a_box(lambda operation, text: (0, ()))
        box.on_stop.append(lambda: given_back.append(fds))
        started.set()
        return box

    box = a_box(lambda operation, text: (0, ()))
    box._starter = start
    forking = asyncio.create_task(box._start_all(Stack(own=("f",), ancestors=1), [(1,), (2,)]))
    await started.wait()
    await asyncio.sleep(0)
    others.set() if fails else forking.cancel()
    (ended,) = await asyncio.gather(forking, return_exceptions=True)
    assert isinstance(ended, Unavailable if fails else asyncio.CancelledError)
    assert given_back == [(1,)]


async def test_a_fork_that_fails_half_way_closes_the_layers_that_were_passed_on():
    read, write = os.pipe()
    os.close(read)

    def says(operation, text):
        if operation == protocol.Operation.FREEZE:
            return 0, ()
        return (0, (write,)) if text == b"a0\0" else (errno.EMFILE, ())

    with pytest.raises(Unavailable, match="passed on"):
        await a_box(says).fork(1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write)
