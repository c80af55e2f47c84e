"""The demo's simulated users over two gateways: a user without an answer retries at the other, and feedback is sent until it is accepted.

``python -m tests.examinations.hosts.users OUT URL URL SECONDS USERS SEED copilot|letters WORD ...``

They ask for the demo's tasks with its tastes and tempers (`ostinato.demo.users`), or, with the tiny model, for answers that begin with a
lower-case letter. Each call has an Idempotency-Key and an episode of the same name, so that the log shows how many turns it led to. OUT
gets a line of JSON for each call, with every try, and for each feedback, with the result of every attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from tests.examinations.hosts.settings import CLIENT_KEY, LETTERS, LIKED, letters

from ostinato.config import Config, load
from ostinato.core.clock import wall_clock
from ostinato.demo import tasks as demo_tasks
from ostinato.demo.tasks import TaskPrompt
from ostinato.demo.users import (
    Failed,
    SimulatedUser,
    Suggestion,
    UsersConfig,
    UserTask,
    ask,
    body,
    make_users,
    send_feedback,
)
from ostinato.launch.views.progress import Progress
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.sandbox import SingleRuns

TRIES, FEEDBACK_TRIES = 8, 12
_HOME_S = 10.0  # seconds that a user stays with the other gateway
_LIMITS = aiohttp.ClientTimeout(
    total=None, sock_connect=4.0, sock_read=25.0
)  # a stream sends a comment every ten seconds
Judge = Callable[[Any, str], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A task for users of the tiny model."""

    id: str
    family: str = "letters"

    @property
    def prompt(self) -> TaskPrompt:
        return TaskPrompt(messages=tuple(letters(int(self.id))), max_tokens=LETTERS["max_tokens"], stop=())


class Keyed:
    """A session whose requests carry these headers, which the demo's client cannot set."""

    def __init__(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> None:
        self._session, self._headers = session, headers

    def post(self, path: str, **request: Any) -> Any:
        return self._session.post(path, headers=self._headers, **request)


class Crowd:
    """All users. `write` gets each line."""

    def __init__(
        self, sessions: Sequence[aiohttp.ClientSession], tasks: Sequence[Any], judge: Judge, config: UsersConfig, seed: int,
        write: Callable[..., None],
    ) -> None:  # fmt: skip
        self._sessions, self._judge, self._config, self._seed, self._write = sessions, judge, config, seed, write
        self._families: dict[str, list[Any]] = {}
        for task in tasks:
            self._families.setdefault(task.family, []).append(task)

    async def live(self, at: int, user: SimulatedUser, ends: float, feedback: asyncio.TaskGroup) -> None:
        """Ask, read, react and think, until the time is over."""
        dice, away_until = random.Random(f"{self._seed}/{user.id}"), 0.0
        await asyncio.sleep(dice.uniform(0, self._config.think_s) * user.pace)
        for number in count(1):
            if wall_clock() >= ends:
                return
            key, task = f"{user.id}-{self._seed}-{number}", self._pick(user, dice)
            home = at % 2
            gateway = home if wall_clock() >= away_until else 1 - home
            tries, answer = await self._ask(key, user, task, gateway, dice)
            if len(tries) > 1:
                away_until = wall_clock() + _HOME_S
            line: dict[str, Any] = {"key": key, "user": user.id, "tries": tries}
            if answer is None:
                self._write("call", **line, outcome="given up")
                continue
            outcome = "ignored"
            if dice.random() >= self._config.ignore_share:
                liked = await self._judge(task, answer.text) and len(answer.text) <= user.patience_chars
                liked ^= dice.random() < self._config.noise
                outcome = "accepted" if liked else "rejected"
                feedback.create_task(self._react(key, user, answer.turn, outcome, gateway, dice))
            self._write(
                "call",
                **line,
                outcome=outcome,
                turn=answer.turn,
                text=answer.text,
                arm=answer.arm,
                policy=answer.policy,
            )
            await asyncio.sleep(dice.expovariate(1.0) * self._config.think_s * user.pace)

    async def _ask(
        self, key: str, user: SimulatedUser, task: Any, gateway: int, dice: random.Random
    ) -> tuple[list[dict[str, Any]], Suggestion | None]:
        """Ask with one key, alternating between the gateways. Returns the tries, and the answer or None if the user gave up."""
        request = self._request(task, user)
        headers, tries = {"Idempotency-Key": key, "X-Ostinato-Episode": key}, list[dict[str, Any]]()
        for number in range(TRIES):
            began, which = wall_clock(), (gateway + number) % 2
            answer, kind = None, "answered"
            try:
                answer = await ask(Keyed(self._sessions[which], headers), request)  # pyright: ignore[reportArgumentType]
            except Failed as failure:
                kind = failure.kind
            tries.append({"gateway": which + 1, "at": began, "s": round(wall_clock() - began, 3), "end": kind})
            if answer is not None:
                return tries, answer
            await asyncio.sleep(min(2.0, 0.25 * 2**number) * dice.uniform(0.5, 1.5))
        return tries, None

    def _request(self, task: Any, user: SimulatedUser) -> dict[str, Any]:
        request = body(task.prompt, user.id, self._config.model)
        if isinstance(task, Letter):
            del request["stop"]
            request |= {"continue_final_message": False, "add_generation_prompt": True}
        return request

    async def _react(
        self, key: str, user: SimulatedUser, turn: str, said: str, gateway: int, dice: random.Random
    ) -> None:
        """Send the judgement after the reaction time. A share of judgements is sent a second time, to the other gateway."""
        delay = dice.expovariate(1.0) * self._config.reaction_s * user.pace
        if dice.random() < self._config.late_share:
            delay += dice.uniform(0, self._config.late_s)
        twice = dice.random() < self._config.duplicate_share
        await asyncio.sleep(delay)
        event = {"id": key, "target": turn, "name": said, "value": 1.0, "source": "human"}
        ends = list[str]()
        for number in range(FEEDBACK_TRIES):
            ends.append(await self._send((gateway + number) % 2, event))
            if ends[-1] == "taken":
                break
            await asyncio.sleep(min(4.0, 0.5 * 2**number))
        again = await self._send((gateway + len(ends)) % 2, event) if twice else ""
        self._write("signal", id=key, turn=turn, name=said, ends=ends, again=again)

    async def _send(self, which: int, event: dict[str, Any]) -> str:
        try:
            await send_feedback(self._sessions[which], event)
        except Failed as failure:
            return failure.kind
        return "taken"

    def _pick(self, user: SimulatedUser, dice: random.Random) -> UserTask:
        family = dice.choices(user.families, [1.0 / (rank + 2) for rank in range(len(user.families))])[0]
        tasks = self._families[family]
        return dice.choices(tasks, [1.0 / (rank + 2) for rank in range(len(tasks))])[0]


async def ready(session: aiohttp.ClientSession) -> None:
    """Wait until the gateway serves live and control."""
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with session.get("/health") as response:
                if {"live", "control"} <= (await response.json()).get("slots", {}).keys():
                    return
        await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def judging(scenario: str, config: Config) -> Any:
    """The tasks, and a function that judges whether an answer is what the user wanted."""
    if scenario == "letters":

        async def looks_well(task: Letter, text: str) -> bool:
            return re.search(LIKED, text) is not None

        yield [Letter(id=str(number)) for number in range(7)], looks_well
        return
    tasks, _ = demo_tasks.split(demo_tasks.load())
    async with SingleRuns(config.sandbox) as sandbox:
        await sandbox.check()
        gate = asyncio.Semaphore(UsersConfig().grading)

        async def passes(task: demo_tasks.Blank, text: str) -> bool:
            async with gate:
                return await python_tests(task.head, text, task.tests, sandbox, config.evaluate.grade_timeout_s) >= 1.0

        yield tasks, passes


async def main(
    out: str, first: str, second: str, seconds: float, users: int, seed: int, scenario: str, words: list[str]
) -> None:
    config, write = load(None, words), Progress(Path(out), 1 << 30).write
    behaviour = UsersConfig(count=users, model=config.model.served_as)
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                aiohttp.ClientSession(base, headers=headers, timeout=_LIMITS, connector=aiohttp.TCPConnector(limit=0))
            )
            for base in (first, second)
        ]
        tasks, judge = await stack.enter_async_context(judging(scenario, config))
        await asyncio.gather(*map(ready, sessions))
        write("began")
        crowd, ends = Crowd(sessions, tasks, judge, behaviour, seed, write), wall_clock() + seconds
        async with asyncio.TaskGroup() as group:
            for at, user in enumerate(make_users(tasks, behaviour, seed)):
                group.create_task(crowd.live(at, user, ends, group))
        write("ended")


if __name__ == "__main__":
    out, first, second, seconds, users, seed, scenario, *words = sys.argv[1:]
    asyncio.run(main(out, first, second, float(seconds), int(users), int(seed), scenario, words))
