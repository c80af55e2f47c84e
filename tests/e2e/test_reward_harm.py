"""What a bad reward function and a silent feedback pipeline do to a run: they cost their own turns, are told, and learning goes on."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

import aiohttp
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import open_run
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Batch, Holdback, Quarantine, Reward, Row
from ostinato.reward.accounting import account

FATES = """
import os, time
from ostinato.core.records import Pending, Reward

def fn(turn, signals, now):
    due = turn.ended_at + 0.3
    if now < due:
        return Pending(until=due)
    fate = signals[0].name if signals else "silence"
    value = {"accepted": 1.0, "rejected": -1.0, "nan": float("nan"), "huge": 1e308}.get(fate, 0.0)
    if fate == "raises":
        raise RuntimeError("no idea")
    while fate == "hangs":
        try:
            time.sleep(60)
        except BaseException:
            pass
    if fate == "says":
        return "well done"
    if fate == "takes":
        value = len(bytearray(10 << 30))
    if fate == "prints":
        print('["Reward", [{}]]\\n' * 1000, flush=True)
    if fate == "forks":
        os.fork()
    if fate == "ends" and os.fork():
        os._exit(0)
    return Reward(turn=turn.id, value=value, function="fates@1", signals=tuple(s.id for s in signals), at=due)
"""

REASONS = {
    "raises": "reward_failed: RuntimeError: no idea",
    "hangs": "reward_hung: no answer in 10 s",
    "nan": "reward_nonsense: the value nan",
    "huge": "reward_nonsense: the value 1e+308",
    "says": "reward_nonsense: a str is no Reward",
    "takes": "reward_failed: MemoryError",
    "ends": "reward_",  # its process ended; a copy of it that lives on may hide that until its time is over
}
HARMLESS = ("prints", "forks")
QUICK = (
    "reward.function='fates:fn'",
    "reward.options={}",
    "reward.answer_s=10.0",
    "reward.memory_bytes=2000000000",
    "reward.max_staleness=10000",
    "reward.coverage.min_turns=20",
    "reward.user_cap=1.0",
    "reward.tenant_cap=1.0",
    "serve.control_share=0.0",
    "learn.batch=12",
    "learn.publish_every=5000",  # what was learned is not judged here
    "learn.max_lead=9000",
)


class People:
    """Users who ask one thing after another and do about the answer what they are told to."""

    def __init__(self, run) -> None:
        self._run = run
        self._asked = 0

    async def react(self, *names: str | None) -> list[str]:
        """One question each, and what is said about the answers; None: nothing. Returns the turns."""
        turns: list[str] = []
        async with aiohttp.ClientSession(
            self._run.url, timeout=aiohttp.ClientTimeout(total=WHOLE_PROGRAM_S)
        ) as session:
            async with session.get("/health") as response:
                model = (await response.json())["model"]
            for name in names:
                self._asked += 1
                said = [{"role": "user", "content": f"say {self._asked}"}]
                body = {"model": model, "messages": said, "max_tokens": 4, "temperature": 1.0, "user": "ann"}
                async with session.post("/v1/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    turns += (await response.json())["ostinato"]["turns"]
                if name is not None:
                    event = {
                        "id": f"s{self._asked}",
                        "target": turns[-1],
                        "name": name,
                        "value": True,
                        "source": "human",
                    }
                    async with session.post("/v1/feedback", json=event) as response:
                        assert response.status == 202
        return turns


class Seen:
    """The run's log, as anybody may read it."""

    def __init__(self, log) -> None:
        self._log = log

    async def rows(self, kind: type[Row]) -> list:
        return [row async for _, row in self._log.read(0, {kind})]

    async def reasons(self, kind: type[Row], turns: list[str]) -> dict[str, str]:
        return {row.turn: row.reason for row in await self.rows(kind) if row.turn in turns}

    async def alarm(self, name: str) -> AlarmState | None:
        """The state of its newest row."""
        return next((row.state for row in reversed(await self.rows(Alarm)) if row.name == name), None)


async def until(what: str, condition: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not await condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"not within {WHOLE_PROGRAM_S:g} s: {what}") from None


def status(run) -> str:
    """What a person sees."""
    command = [sys.executable, "-m", "ostinato.cli", "status", "--set", f"run.directory='{run.config.run.directory}'"]
    shown = FORK_SERVER.run(command, env={"COLUMNS": "300"}, timeout=WHOLE_PROGRAM_S)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


async def bad_answers_cost_their_own_turns(run, people: People, seen: Seen) -> None:
    before = len(await seen.rows(Batch))
    turns = await people.react(*REASONS, *HARMLESS)
    fates = dict(zip([*REASONS, *HARMLESS], turns, strict=True))

    async def decided() -> bool:
        done = [row.turn for kind in (Reward, Quarantine) for row in await seen.rows(kind)]
        return set(turns) <= set(done)

    await until("every fate is decided", decided)
    reasons = await seen.reasons(Quarantine, turns)
    assert set(reasons) == {fates[name] for name in REASONS}
    for name, reason in REASONS.items():
        assert reasons[fates[name]].startswith(reason)
    assert {row.turn for row in await seen.rows(Reward)} >= {fates[name] for name in HARMLESS}
    assert "reward_function: " in await asyncio.to_thread(status, run)
    assert await seen.reasons(Holdback, turns) == reasons, "and none of them is learned from"

    async def learned() -> bool:
        return len(await seen.rows(Batch)) >= before + 2

    await people.react(*["accepted", "rejected"] * 13)
    await until("two batches more", learned)

    async def cleared() -> bool:
        return await seen.alarm("reward_function") is AlarmState.CLEARED

    await until("the alarm is cleared", cleared)


async def silence_is_not_learned_from(run, people: People, seen: Seen) -> None:
    silent = await people.react(*[None] * 40)

    async def raised() -> bool:
        return await seen.alarm("coverage:default") is AlarmState.RAISED

    await until("the alarm is raised", raised)
    assert "coverage:default: no feedback for" in await asyncio.to_thread(status, run)
    more = await people.react(*[None] * 6)

    async def held() -> bool:
        return set(more) <= set(await seen.reasons(Holdback, more))

    await until("silence is held back", held)
    assert set((await seen.reasons(Holdback, more)).values()) == {"coverage"}
    waiting = [turn for turn, reason in (await seen.reasons(Holdback, silent)).items() if reason == "coverage"]
    assert waiting, "also what had its reward before the alarm and was not learned from yet"
    await people.react(*["accepted", "rejected"] * 6)

    async def cleared() -> bool:
        return await seen.alarm("coverage:default") is AlarmState.CLEARED

    await until("the alarm is cleared", cleared)
    assert "coverage:default" not in await asyncio.to_thread(status, run)


async def test_nothing_about_rewards_stops_learning(tmp_path, running, monkeypatch):
    (tmp_path / "fates.py").write_text(FATES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    run = await running(tmp_path, *QUICK, names=("serve", "train"))
    try:
        with open_run(run.config) as opened:
            people, seen = People(run), Seen(opened.log)
            await people.react(*["accepted", "rejected"] * 15)
            await bad_answers_cost_their_own_turns(run, people, seen)
            await silence_is_not_learned_from(run, people, seen)
            assert not [event for event in run.events if "starts again" in event[1]], "no worker fell over"
            for found in (await recount(opened.log), await account(opened.log, opened.folds, run.config.reward)):
                assert found.balanced, found
    finally:
        await run.stop()
