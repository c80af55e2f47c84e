"""Each refusal in full: what is wrong, whose it is, and what to do. A person reads these at night, so every word is held to."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.unit.reward.hanging import HANGING, time_begins_with_a_hang

from ostinato.core.errors import BadConfig, Conflict, Corrupt, NoSignal
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Batch, Holdback, NoReward, Pending, PolicyVersion, Quarantine, Reward, Turn
from ostinato.reward.alarms import REWARDS_TO_CLEAR, Alarms
from ostinato.reward.baseline import Baseline
from ostinato.reward.config import BaselineConfig, CoverageConfig, RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode
from ostinato.reward.ledger import TurnLedger
from ostinato.reward.ledger_entries import untrainable
from ostinato.reward.pipeline import RewardDesk, recorded, training_batch
from ostinato.reward.protocol import Failure, RewardRequest, checked, failed, load, read_answer
from ostinato.reward.runners import LONGEST_LINE, Inline, Isolated
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_delivery, a_turn

COPILOT = "ostinato.reward.functions:copilot"
V0 = PolicyVersion(number=0, hash="00")
ASKED = RewardRequest(turn=a_turn(), signals=(), now=41.0)


def refused(kind: type[Exception], message: str) -> Any:
    """The whole message, to the letter."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


# ---------------------------------------------------------------- the function's answers


def reward(**changes: Any) -> Reward:
    return replace(Reward(turn="t:0", value=1.0, function="fate@1", signals=(), at=41.0), **changes)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "a NoneType is no Reward, Pending or NoReward"),
        (reward(turn="other:0"), "a reward for turn other:0"),
        (reward(turn="x" * 201), f"a reward for turn {'x' * 200}..."),
        (reward(turn="x" * 200), f"a reward for turn {'x' * 200}"),
        (reward(turn=" two\n words"), "a reward for turn two words"),
        (reward(value=math.nan), "the value nan; it must be a number from -2 to 2 (reward.max_abs)"),
        (reward(value=2.5), "the value 2.5; it must be a number from -2 to 2 (reward.max_abs)"),
        (reward(function=""), "a function's name that is not 1 to 256 printable characters"),
        (reward(function="x" * 257), "a function's name that is not 1 to 256 printable characters"),
        (reward(signals=("s9",)), "signals that it was not asked about"),
        (reward(at=math.inf), "the time inf"),
        (Pending(until=41.0), "Pending until 41.0, which is not after 41"),
        (NoReward(reason="x" * 65), "NoReward with a reason that is not one of 1 to 64 printable characters"),
    ],
)
def test_nonsense(answer: object, reason: str):
    assert checked(answer, ASKED, 2.0) == Failure(reason=f"reward_nonsense: {reason}")


@pytest.mark.parametrize(
    "answer",
    [
        reward(value=2.0),
        reward(value=-2.0),
        reward(function="x"),
        reward(function="x" * 256),
        NoReward(reason="x"),
        NoReward(reason="x" * 64),
    ],
)
def test_what_is_just_within_the_limits_is_believed(answer: object):
    assert checked(answer, ASKED, 2.0) == answer


def test_a_failure():
    assert failed("its process ended (7)").reason == "reward_failed: its process ended (7)"
    assert failed(ZeroDivisionError("by\nzero")).reason == "reward_failed: ZeroDivisionError: by zero"
    assert failed("half a pair \ud83d").reason == "reward_failed: half a pair ?"
    assert checked(Failure(reason="x" * 300), ASKED, 2.0) == Failure(reason="x" * 200 + "...")


def test_a_line_that_is_no_answer():
    with refused(ValueError, f"not an answer: {b'x' * 200!r}"):
        read_answer(b"x" * 300)


# ---------------------------------------------------------------- the function and its options


def test_an_option_that_may_be_none_can_be_set_to_it_where_there_is_no_null():
    found: Any = load(COPILOT, {"silence": "null"})
    assert found.keywords == {"silence": None}
    with pytest.raises(BadConfig, match=r"reward.options.t = 'null' does not suit"):
        load(COPILOT, {"t": "null"})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("copilot", {}, "reward.function 'copilot' must have the form 'module:function'"),
        (
            "ostinato.reward.absent:copilot",
            {},
            "reward.function 'ostinato.reward.absent:copilot': module ostinato.reward.absent cannot be imported: "
            "No module named 'ostinato.reward.absent'",
        ),
        (
            "yours:reward",
            {},
            "reward.function 'yours:reward': module yours cannot be imported: No module named 'yours'; start where its file is, "
            "or put that directory into PYTHONPATH",
        ),
        (
            "ostinato.reward.functions:copilto",
            {},
            "reward.function 'ostinato.reward.functions:copilto': no copilto in it; did you mean copilot?",
        ),
        (
            "ostinato.reward.functions:zzz",
            {},
            "reward.function 'ostinato.reward.functions:zzz': no zzz in it; known: agent, agent_parts, considered, copilot, fates, "
            "kept_share, parts_of, tab",
        ),
        (
            "ostinato.reward.functions:ACCEPTED",
            {},
            "reward.function 'ostinato.reward.functions:ACCEPTED' is a str, not a function",
        ),
        ("odd_reward:qqqq", {}, "reward.function 'odd_reward:qqqq': no qqqq in it; known: needy, other"),
        ("odd_reward:other", {"qqqq": 1}, "reward.options.qqqq: odd_reward:other has no such option; known: none"),
        (COPILOT, {"windwo": 3}, f"reward.options.windwo: {COPILOT} has no such option; did you mean window?"),
        (
            COPILOT,
            {"qqqq": 3},
            f"reward.options.qqqq: {COPILOT} has no such option; known: left, outcomes, silence, t, window",
        ),
        (COPILOT, {"widget": 3}, f"reward.options.widget: {COPILOT} has no such option; did you mean window?"),
        ("odd_reward:needy", {}, "reward.options.scale is missing: odd_reward:needy needs it"),
        (COPILOT, {"t": 1.5}, f"reward.options.t = 1.5 does not suit {COPILOT}: Input should be less than 1"),
    ],
)
def test_a_function_that_cannot_be_used(
    name: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = (
        "import os\ndef needy(turn, signals, now, *, scale): ...\ndef other(turn, signals, now): ...\ndef _own(): ...\n"
    )
    (tmp_path / "odd_reward.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with refused(BadConfig, message):
        load(name, options)


def test_an_option_without_a_type_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "free_reward.py").write_text("def free(turn, signals, now, *, scale): return scale\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer: Any = load("free_reward:free", {"scale": "as given"})(ASKED.turn, (), 1.0)
    assert answer == "as given"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return None", "reward_nonsense: a NoneType is no Reward, Pending or NoReward"),
        ("os._exit(7)", "reward_failed: its process ended (7)"),
        ("time.sleep(60)", "reward_hung: no answer in 0.5 s"),
        ("flood()", f"reward_failed: its answer is longer than {LONGEST_LINE} bytes"),
        ("answer(b'[]')", "reward_failed: not an answer: b'[]\\n'"),
    ],
)
async def test_what_befalls_a_function_in_a_process_of_its_own(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`answer` writes past the protocol: into whatever descriptor is the pipe that answers go into."""
    mark = tmp_path / "hangs"
    time_begins_with_a_hang(monkeypatch, mark)
    if body == "time.sleep(60)":
        body = f"{HANGING.format(mark=str(mark))}; {body}"
    text = f"""
import os, stat, sys, time
def answer(line):
    for fd in range(3, 20):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode) or stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, line + b"\\n")
        except OSError:
            pass
    time.sleep(60)
def flood():
    answer(b"x" * {LONGEST_LINE + 10})
def fate(turn, signals, now):
    {body}
"""
    (tmp_path / "worst_reward.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    asker = Isolated("worst_reward:fate", {}, answer_s=0.5, load_s=60.0, max_abs=2.0, memory_bytes=1 << 32)
    try:
        assert await asker.ask([ASKED]) == [Failure(reason=reason)]
    finally:
        await asker.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(5)", "reward.function 'bad_reward:x': importing it raised SystemExit: 5"),
        ("import os; os._exit(3)", "reward.function 'bad_reward:x': it could not be loaded: reward_failed: its process ended (3)"),
        (
            "while True: pass",
            "reward.function 'bad_reward:x': it could not be loaded: reward_hung: no answer in 3 s",
        ),
        ("y = 1", "reward.function 'bad_reward:x': no x in it; known: none"),
    ],
)  # fmt: skip
async def test_a_function_that_cannot_be_loaded(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "bad_reward.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_s = 3.0 if text.startswith("while") else WHOLE_PROGRAM_S
    asker = Isolated("bad_reward:x", {}, answer_s=1.0, load_s=load_s, max_abs=1.0, memory_bytes=1 << 32)
    with refused(BadConfig, message):
        await asker.open()
    await asker.close()


# ---------------------------------------------------------------- batches


def credit(rewards: Sequence[float]) -> None:
    turns = [a_turn(f"t{i}:0") for i in range(len(rewards))]
    known = {turn.id: value for turn, value in zip(turns, rewards, strict=True)}
    SingleRollout(RewardConfig(), Baseline(BaselineConfig()))(by_episode(turns), known)


@pytest.mark.parametrize(
    ("rewards", "kind", "message"),
    [
        ([], NoSignal, "the batch is empty"),
        ([math.inf], ValueError, "a reward is not finite"),
        ([0.25, 0.25], NoSignal, "all 2 rewards are 0.25: nothing tells a good turn from a bad one"),
        ([0.0], NoSignal, "the baseline explains every reward: the residuals' RMS is below 1e-08"),
    ],
)
def test_a_batch_that_teaches_nothing(rewards: list[float], kind: type[Exception], message: str):
    with refused(kind, message):
        credit(rewards)


def batch(step: int, *turns: str) -> Batch:
    return Batch(step=step, turns=turns, credits=((),) * len(turns), reference=V0, at=1.0)


async def test_a_batch_that_is_not_there_or_not_whole():
    log = MemoryLog()
    message = "batch 3 is no longer in the log: resume from a checkpoint of step 3 or later, or restore the log"
    with refused(Corrupt, message):
        await anext(recorded(log, 3, 4))
    missing = "batch 1 names turn t:0, which the log does not hold; restore the log"
    with refused(Corrupt, missing):
        training_batch(batch(1, "t:0"), [a_turn()], [])
    with refused(Corrupt, missing):
        training_batch(batch(1, "t:0"), [], [reward()])


def test_a_log_that_contradicts_itself():
    ledger = TurnLedger(RewardConfig())
    with refused(Corrupt, "the log's batch 1 holds turn no:0, which is without a reward; restore the log"):
        ledger.apply(1, batch(1, "no:0"))
    one = a_turn()
    ledger.apply(1, one)
    with refused(Corrupt, "the log's batch 1 holds turn t:0, which is without a reward; restore the log"):
        ledger.apply(2, batch(1, one.id))
    ledger.apply(3, reward())
    ledger.apply(4, batch(1, one.id))
    with refused(Corrupt, "the log's batch 2 holds turn t:0, which is trained; restore the log"):
        ledger.apply(5, batch(2, one.id))


def test_a_batch_of_turns_from_before_the_fold_is_believed():
    ledger = TurnLedger(RewardConfig(), start=100)
    ledger.apply(101, batch(7, "long:0"))
    assert ledger.last_step == 7
    ledger.apply(102, a_turn())
    with pytest.raises(Corrupt):
        ledger.apply(103, batch(8, "t:0"))


async def test_a_step_out_of_order_and_a_second_trainer():
    log = MemoryLog()

    class Overtaken(MemoryLog):
        """Another process's row about the batch is there first."""

        async def append(self, *rows: Any) -> int:
            theirs = [replace(row, at=0.0) if isinstance(row, Batch) else row for row in rows]
            return await super().append(*theirs)

    def fn(turn: Turn, signals: object, now: float) -> Reward:
        return Reward(turn=turn.id, value=float(turn.id == "t0:0"), function="f@1", signals=(), at=now)

    def desk(of: MemoryLog) -> RewardDesk:
        return RewardDesk(of, Inline(fn, max_abs=9.0), lambda: 99.0, RewardConfig(user_cap=1.0))

    with refused(Conflict, "step 3 was asked for, but the log's last batch is 0; ask for the next"):
        await desk(log).batch(3, 1, V0)
    log = Overtaken()
    turns = [replace(a_turn(f"t{i}:0", user=f"u{i}"), episode=f"e{i}") for i in range(4)]
    await log.append(*turns, a_delivery(*turns))
    with refused(Conflict, "another process wrote batch 1; only one trainer may use a log: stop the other"):
        await desk(log).batch(1, 4, V0)


def test_rewards_that_were_believed_under_a_wider_bound():
    ledger = TurnLedger(RewardConfig(max_abs=1.0))
    ledger.apply(1, a_turn())
    ledger.apply(2, reward(value=2.5))
    assert ledger.to_hold == {"t:0": "reward_nonsense: 2.5 is beyond reward.max_abs"}
    ledger.apply(3, a_turn("u:0"))
    ledger.apply(4, reward(turn="u:0", value=-1.0))
    assert "u:0" in ledger.matured


def test_what_is_held_back_before_its_reward_is_known_stays_held_back():
    ledger = TurnLedger(RewardConfig())
    ledger.apply(1, a_turn())
    ledger.apply(2, Holdback(turn="t:0", reason="arm:odd", at=1.0))
    assert (ledger.held, ledger.to_hold, ledger.first_open(("episode", "default", "episode of t:0"))) == (
        {"arm:odd": 1},
        {},
        None,
    )
    ledger.apply(3, reward())
    assert (ledger.matured, ledger.to_hold) == ({}, {})


@pytest.mark.parametrize(("temperature", "why"), [(0.0, "greedy"), (0.05, "cold"), (0.1, None), (1.0, None)])
def test_why_a_turn_is_not_learned_from(temperature: float, why: str | None):
    made = a_turn()
    assert untrainable(replace(made, sampling=replace(made.sampling, temperature=temperature)), 0.1) == why


# ---------------------------------------------------------------- alarms


def test_alarms_in_full():
    alarms = Alarms(CoverageConfig(), start=40)
    alarms.failed("t:0: reward_failed: ZeroDivisionError")
    (raised,) = alarms.due(7.0)
    assert raised == Alarm(
        id="reward_function:41",
        name="reward_function",
        state=AlarmState.RAISED,
        reason="t:0: reward_failed: ZeroDivisionError",
        at=7.0,
        detail={},
    )
    alarms.apply(raised)
    assert (alarms.standing(), list(alarms.due(8.0))) == (["reward_function"], [])
    for _ in range(REWARDS_TO_CLEAR - 1):
        alarms.answered()
    assert list(alarms.due(9.0)) == []
    alarms.answered()
    (cleared,) = alarms.due(9.0)
    assert (cleared.id, cleared.state, cleared.reason) == (
        "reward_function:42",
        AlarmState.CLEARED,
        "20 rewards in a row",
    )
    alarms.apply(cleared)
    assert (alarms.standing(), list(alarms.due(9.0))) == ([], [])


def test_the_alarm_about_silence_in_full():
    alarms = Alarms(CoverageConfig(min_turns=10))
    for _ in range(400):
        alarms.decided("acme", heard=True)
    silent = 0
    while not (due := list(alarms.due(5.0))):
        alarms.decided("acme", heard=False)
        silent += 1
    (raised,) = due
    assert (raised.id, raised.name, raised.state) == ("coverage:acme:1", "coverage:acme", AlarmState.RAISED)
    assert raised.reason == (
        f"no feedback for {silent} turns, where 100% of turns usually have some: "
        "silence is not learned from until it is back. Look at what sends feedback to /v1/feedback"
    )
    assert raised.detail == {"usual": 1.0, "silent": silent, "turns": 400 + silent}
    alarms.apply(raised)
    assert (alarms.silenced("acme"), alarms.silenced("other")) == (True, False)
    switched_off = Alarms(CoverageConfig(enabled=False))
    switched_off.restore(alarms.snapshot())
    (cleared,) = switched_off.due(6.0)
    assert (cleared.id, cleared.state, cleared.reason) == (
        "coverage:acme:2", AlarmState.CLEARED, "reward.coverage is switched off",
    )  # fmt: skip
    alarms.apply(replace(raised, id="x", name="disk"))
    assert alarms.standing() == ["coverage:acme"]


def test_only_a_failing_function_raises_the_functions_alarm():
    ledger = TurnLedger(RewardConfig())
    for i, reason in enumerate(["no_reward:silence", "undelivered", "reward_hung: no answer in 5 s"]):
        ledger.apply(2 * i + 1, a_turn(f"t{i}:0"))
        ledger.apply(2 * i + 2, Quarantine(turn=f"t{i}:0", reason=reason, at=1.0))
    (raised,) = ledger.alarms.due(1.0)
    assert raised.reason == "t2:0: reward_hung: no answer in 5 s"
    assert ledger.quarantined == {"no_reward:silence": 1, "undelivered": 1, "reward_hung": 1}
