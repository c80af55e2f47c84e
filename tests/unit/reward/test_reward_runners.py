"""Asking a reward function: whatever it does, the other turns get their answers, and soon."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.unit.reward.hanging import time_begins_with_a_hang

from ostinato.core import child_process
from ostinato.core.child_process import _Protocol
from ostinato.core.errors import BadConfig
from ostinato.core.records import NoReward, Pending, Reward, Signal, Source
from ostinato.reward.protocol import (
    Failure,
    RewardRequest,
    Unloadable,
    answer_line,
    checked,
    question_line,
    read_answer,
    read_question,
)
from ostinato.reward.runners import Inline, Isolated
from ostinato.testing.records import a_turn

NAUGHTY = '''
import os, sys, time
from ostinato.core.records import NoReward, Pending, Reward

def fate(turn, signals, now, *, scale: float = 1.0):
    """Does what the turn's text says; prints, which must not disturb anything."""
    print("working on", turn.id)
    if turn.text == "raise":
        raise ZeroDivisionError("division by zero")
    if turn.text == "exit":
        sys.exit(3)
    if turn.text == "die":
        os._exit(7)
    if turn.text == "flood":
        return Reward(turn=turn.id, value=0.0, function="x" * (3 << 20), signals=(), at=now)
    if turn.text == "hang":
        open(__file__ + ".hangs", "w").close()
    while turn.text == "hang":
        try:
            time.sleep(0.01)
        except BaseException:
            pass
    if turn.text == "read":
        assert sys.stdin.read() == ""
    if turn.text == "pid":
        return NoReward(reason=str(os.getpid()))
    if turn.text == "memory":
        return NoReward(reason=str(len(bytearray(10 << 30))))
    if turn.text == "fork":
        os.fork()  # two processes come to the answer
    if turn.text == "daemon" and os.fork():
        os._exit(0)  # the parent ends, the copy answers
    if turn.text == "helper":
        return NoReward(reason=str(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")))
    if turn.text == "escape":
        told, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.setsid()  # no longer of the group that is killed
            os.close(tell)
            time.sleep(20)
            os._exit(0)
        os.close(tell)
        os.read(told, 1)
        return NoReward(reason=str(child))
    if turn.text == "later":
        return Pending(until=now + 1)
    return Reward(turn=turn.id, value=scale * len(signals), function="fate@1", signals=tuple(s.id for s in signals), at=now)
'''


def question(text: str = "", id: str = "t:0", signals: int = 1, now: float = 41.0) -> RewardRequest:
    turn = replace(a_turn(id), text=text)
    about = (
        Signal(id=f"s{i}", turn=id, name="x", value=1.0, source=Source.HUMAN, occurred_at=1.0, received_at=1.0)
        for i in range(signals)
    )
    return RewardRequest(turn=turn, signals=tuple(about), now=now)


def reward(**changes) -> Reward:
    return replace(Reward(turn="t:0", value=1.0, function="fate@1", signals=("s0",), at=41.0), **changes)


# ---------------------------------------------------------------- what may be answered


class Odd:
    """An object whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "a NoneType is no Reward"),
        (0.75, "a float is no Reward"),
        (reward(turn="other:0"), "a reward for turn other:0"),
        (reward(value=math.nan), "the value nan"),
        (reward(value=math.inf), "the value inf"),
        (reward(value=1e200), "it must be a number from -100 to 100"),
        (reward(value=-100.5), "the value -100.5"),
        (reward(value="1.0"), "the value 1.0"),
        (reward(function=""), "a function's name"),
        (reward(function="f\ud800"), "a function's name"),
        (reward(function=7), "a function's name"),
        (reward(signals=("s0", "s9")), "signals that it was not asked about"),
        (reward(signals="s0"), "signals that it was not asked about"),
        (reward(at=math.inf), "the time inf"),
        (Pending(until=math.nan), "Pending until nan"),
        (Pending(until=math.inf), "Pending until inf"),
        (Pending(until=41.0), "which is not after 41"),
        (NoReward(reason=""), "printable characters"),
        (NoReward(reason="x" * 65), "printable characters"),
        (NoReward(reason="two\nlines"), "printable characters"),
    ],
)
async def test_nonsense_is_named(answer: object, why: str):
    found = await Inline(lambda turn, signals, now: answer, max_abs=100.0).ask([question()])
    assert isinstance(found[0], Failure)
    assert found[0].reason.startswith("reward_nonsense: ")
    assert why in found[0].reason
    found[0].reason.encode()


@pytest.mark.parametrize(
    "answer",
    [reward(), reward(value=-100), reward(value=np.float32(0.5)), Pending(until=41.1), NoReward(reason="silence")],
)
def test_sense_passes_as_plain_numbers(answer):
    found = checked(answer, question(), 100.0)
    assert found == answer
    if isinstance(found, Reward):
        assert type(found.value) is float


@pytest.mark.parametrize("error", [ZeroDivisionError("by\nzero"), SystemExit(2), RuntimeError(Odd()), MemoryError()])
async def test_what_a_function_raises_stays_with_its_turn(error: BaseException):
    def fn(turn, signals, now):
        if turn.id == "bad:0":
            raise error
        return reward(turn=turn.id)

    found = await Inline(fn, max_abs=100.0).ask([question(id="a:0"), question(id="bad:0"), question(id="b:0")])
    assert isinstance(found[1], Failure)
    assert found[1].reason.startswith(f"reward_failed: {type(error).__name__}")
    assert [found[0], found[2]] == [reward(turn="a:0"), reward(turn="b:0")]


async def test_an_answer_that_cannot_even_be_looked_at_is_a_failure():
    found = await Inline(lambda turn, signals, now: reward(turn=Odd()), max_abs=100.0).ask([question()])
    assert isinstance(found[0], Failure)


# ---------------------------------------------------------------- the wire


def test_questions_and_answers_survive_the_wire():
    turn = replace(a_turn(routes=b"\xff\x00", prompt=range(50)), text="naïve 🎵\nline")
    asked = RewardRequest(turn=turn, signals=question(signals=3).signals, now=41.5)
    line = question_line(asked)
    assert read_question(line) == asked
    assert line.count(b"\n") == 1
    for answer in (reward(), Pending(until=5.0), NoReward(reason="silence"), Failure(reason="reward_hung: x")):
        assert read_answer(answer_line(answer)) == answer


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"7", b'["Reward"]', b'["Reward",[{"turn":3}]]', b'["Turn",[{}]]', b"\xff"]
)
def test_a_line_that_is_no_answer_is_a_value_error(line: bytes):
    with pytest.raises(ValueError, match="not an answer"):
        read_answer(line)


# ---------------------------------------------------------------- a process of its own


@pytest.fixture
def naughty(tmp_path, monkeypatch):
    (tmp_path / "naughty_reward.py").write_text(NAUGHTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
async def isolated(naughty, monkeypatch):
    time_begins_with_a_hang(monkeypatch, naughty / "naughty_reward.py.hangs")
    asker = Isolated(
        "naughty_reward:fate", {"scale": 2}, answer_s=0.5, load_s=60.0, max_abs=100.0, memory_bytes=1 << 30
    )
    yield asker
    await asker.close()


@pytest.fixture
def started(monkeypatch) -> list[int]:
    """The processes that were started, by their ids."""
    pids: list[int] = []

    class Counted(child_process.Process):
        def __init__(self, *parts):
            super().__init__(*parts)
            pids.append(self.pid)

    monkeypatch.setattr(child_process, "Process", Counted)
    return pids


async def test_one_process_answers_all_and_its_prints_disturb_nothing(isolated: Isolated, started: list[int]):
    many = [question(id=f"t{i}:0", signals=i % 3) for i in range(300)]
    found = await isolated.ask(many)
    assert [answer.value for answer in found] == [2.0 * (i % 3) for i in range(300)]
    (first,) = await isolated.ask([question("pid")])
    (second,) = await isolated.ask([question("pid")])
    assert first == second
    assert len(started) == 1
    assert "naughty_reward" not in sys.modules
    assert await isolated.ask([question("read"), question("later")]) == [
        reward(value=2.0),
        Pending(until=42.0),
    ]


@pytest.mark.parametrize(
    ("text", "why", "processes"),
    [
        ("raise", "reward_failed: ZeroDivisionError: division by zero", 1),
        ("exit", "reward_failed: SystemExit: 3", 1),
        ("die", "reward_failed: its process ended (7)", 2),
        ("hang", "reward_hung: no answer in 0.5 s", 2),
        ("flood", "reward_nonsense: a function's name", 1),
        ("memory", "reward_failed: MemoryError", 1),
        ("daemon", "reward_", 2),
    ],
)
async def test_only_the_turn_at_fault_fails(
    isolated: Isolated, started: list[int], text: str, why: str, processes: int
):
    found = await isolated.ask([question(id="a:0"), question(text, id="bad:0"), question(id="b:0")])
    assert isinstance(found[1], Failure)
    assert found[1].reason.startswith(why)
    assert [answer.turn for answer in (found[0], found[2])] == ["a:0", "b:0"]
    assert len(started) == processes


async def test_a_process_that_has_ended_leaves_nothing_running_and_its_number_is_not_killed_later(
    isolated: Isolated, monkeypatch: pytest.MonkeyPatch
):
    """The number may be that of other processes by then."""
    (helper,) = await isolated.ask([question("helper")])
    assert isolated._process is not None
    ended = isolated._process.process
    os.kill(ended.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENT_S):
        while ended.returncode is None:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    killed: list[int] = []
    with monkeypatch.context() as watched:
        watched.setattr(os, "killpg", lambda pid, _: killed.append(pid))
        await isolated.close()
    assert killed == []
    gone(int(helper.reason))


def test_a_child_that_never_was_is_not_killed(monkeypatch: pytest.MonkeyPatch):
    """Its number would be 0, which is this process's own group."""
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    loop = asyncio.new_event_loop()
    protocol = _Protocol(limit=1, loop=loop)
    loop.close()
    monkeypatch.setattr(protocol, "_maybe_close_transport", lambda: None)
    protocol.process_exited()
    assert killed == []


async def test_a_function_that_forks_gives_one_answer_and_the_next_turn_its_own(isolated: Isolated, started: list[int]):
    many = [question("fork" if i % 2 else "", id=f"t{i}:0", signals=i) for i in range(20)]
    found = await isolated.ask(many)
    assert [(answer.turn, answer.value) for answer in found] == [(f"t{i}:0", 2.0 * i) for i in range(20)]
    assert len(started) == 1


async def test_what_a_function_started_ends_with_its_process(isolated: Isolated):
    (helper,) = await isolated.ask([question("helper")])
    assert running(int(helper.reason))
    await isolated.close()
    gone(int(helper.reason))


async def test_what_a_function_left_in_another_group_holds_nobody_up_and_no_file_open(isolated: Isolated):
    before = os.listdir("/proc/self/fd")
    (escaped,) = await isolated.ask([question("escape")])
    await isolated.close()
    assert running(int(escaped.reason)), "nobody waited for its end"
    async with asyncio.timeout(PATIENT_S):
        while os.listdir("/proc/self/fd") != before:
            await asyncio.sleep(0.01)
    os.kill(int(escaped.reason), signal.SIGKILL)


async def test_a_process_that_is_killed_while_it_has_nothing_to_do_costs_no_turn_its_reward(
    isolated: Isolated, started: list[int]
):
    (first,) = await isolated.ask([question("pid")])
    assert isinstance(first, NoReward)
    os.kill(int(first.reason), signal.SIGKILL)
    assert isolated._process is not None
    await isolated._process.process.wait()
    assert await isolated.ask([question()]) == [reward(value=2.0)]
    assert len(started) == 2


def running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def gone(process: int) -> None:
    until = time.monotonic() + PATIENT_S
    while running(process):
        assert time.monotonic() < until
        time.sleep(0.05)


async def test_a_function_that_always_hangs_costs_two_processes_a_round_and_no_turn_is_blamed_unasked(
    isolated: Isolated, started: list[int]
):
    found = await isolated.ask([question("hang", id=f"t{i}:0") for i in range(50)])
    assert [type(answer) for answer in found[:3]] == [Failure, Failure, type(None)]
    assert found[2:] == [None] * 48
    assert len(started) == 2


async def test_a_cancelled_round_leaves_no_answer_for_the_next(isolated: Isolated):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await isolated.ask([question("hang")])
    assert await isolated.ask([question(id="b:0")]) == [reward(turn="b:0", value=2.0)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("naughty_reward:fate", {"scael": 1}, "did you mean scale?"),
        ("naughty_reward:fait", {}, "did you mean fate?"),
        ("absent_reward:x", {}, "cannot be imported"),
        ("broken_reward:x", {}, "importing it raised SystemExit: 5"),
        ("endless_reward:x", {}, "could not be loaded"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_the_configs_fault(naughty, name: str, options: dict, message: str):
    (naughty / "broken_reward.py").write_text("raise SystemExit(5)\n")
    (naughty / "endless_reward.py").write_text("while True: pass\n")
    load_s = 3.0 if name.startswith("endless") else WHOLE_PROGRAM_S
    asker = Isolated(name, options, answer_s=1.0, load_s=load_s, max_abs=1.0, memory_bytes=1 << 30)
    with pytest.raises(BadConfig) as caught:
        await asker.ask([question()])
    assert message in str(caught.value)
    await asker.close()


async def test_a_function_that_is_broken_while_it_is_used_makes_turns_wait(isolated: Isolated, naughty):
    assert len(await isolated.ask([question()])) == 1
    await isolated.close()
    (naughty / "naughty_reward.py").write_text("this is no python\n")
    with pytest.raises(Unloadable, match="SyntaxError"):
        await isolated.ask([question()])


def test_nothing_is_left_running_when_the_desk_is_killed(naughty):
    script = f"""
import asyncio, os, sys
sys.path.insert(0, {str(naughty)!r})
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_reward_runners import question
from ostinato.reward.runners import Isolated
async def main():
    asker = Isolated("naughty_reward:fate", {{}}, answer_s=60.0, load_s=60.0, max_abs=100.0, memory_bytes=1 << 30)
    for answer in await asker.ask([question("pid"), question("helper")]):
        print(answer.reason, flush=True)
    await asker.ask([question("hang")])
asyncio.run(main())
"""
    desk = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert desk.stdout is not None
    child, helper = int(desk.stdout.readline()), int(desk.stdout.readline())
    time.sleep(0.3)
    assert running(child)
    assert running(helper)
    desk.kill()
    desk.wait()
    desk.stdout.close()
    gone(child)
    gone(helper)


async def test_a_function_that_is_not_there_is_known_before_anything_is_asked():
    asker = Isolated("no_such_module_here:reward", {}, answer_s=5.0, load_s=60.0, max_abs=100.0, memory_bytes=1 << 32)
    with pytest.raises(BadConfig, match="no_such_module_here"):
        await asker.open()
    await asker.close()
