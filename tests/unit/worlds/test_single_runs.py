"""Single runs whose sandbox does not answer, without a sandbox: what is known of them by then, and what becomes of the others."""

import asyncio
import os
import socket

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import Unavailable
from ostinato.worlds.sandbox import SandboxConfig, SingleRuns, backend, protocol


class SilentZygote:
    """Starts boxes that print and never answer, but for those from number `answers` on."""

    def __init__(self, printed, answers=None):
        self.printed, self.answers, self.lines, self.closed = printed, answers, [], 0

    async def start(self, message, fds):
        line = socket.socket(fileno=os.dup(fds[0]))
        self.lines.append(line)
        _, pipes, _, _ = socket.recv_fds(line, 65536, 8)
        os.write(pipes[0], self.printed)
        for pipe in pipes:
            os.close(pipe)
        if self.answers is not None and len(self.lines) > self.answers:
            line.send(protocol.ANSWER.pack(protocol.Operation.EXEC, 1, 0, 0, 1_000))

    def close(self):
        self.closed += 1


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(backend, "_ZYGOTE_GRACE_S", 0.05)
    runs = SingleRuns(SandboxConfig(output_bytes=10))

    def having(printed, answers=None):
        runs._zygote = SilentZygote(printed, answers)
        return runs, runs._zygote

    yield having
    for line in runs._zygote.lines:
        line.close()


async def test_a_run_that_prints_too_much_needs_no_answer(silent):
    runs, zygote = silent(b"x" * 11)
    result = await runs.run("print('x' * 11)", timeout=0.05)
    assert (result.killed_reason, result.code, result.stdout) == ("output", -9, b"x" * 10)
    assert result.seconds >= 0.05
    assert (len(zygote.lines), zygote.closed) == (1, 0)


async def test_a_zygote_whose_runs_do_not_answer_is_replaced_once(silent):
    runs, zygote = silent(b"x" * 10)
    with pytest.raises(Unavailable, match="two attempts"):
        await runs.run("print('x' * 10)", timeout=0.05)
    assert (len(zygote.lines), zygote.closed) == (2, 2)


async def test_a_zygote_that_answers_others_is_not_ended_for_one_run(silent):
    runs, zygote = silent(b"x", answers=1)
    lost = asyncio.create_task(runs.run("print('x', end='')", timeout=PATIENT_S))
    async with asyncio.timeout(PATIENT_S):
        while not zygote.lines:
            await asyncio.sleep(0)
        assert (await runs.run("print('x', end='')", timeout=PATIENT_S)).stdout == b"x"
        zygote.lines[0].close()  # its pid 1 was killed
        assert (await lost).stdout == b"x"
    assert (len(zygote.lines), zygote.closed) == (3, 0)
