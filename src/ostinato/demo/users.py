"""SIMULATED users of the demo, and their HTTP calls. Nobody in this file is a person, and no figure made with it is about people.

Each simulated user asks the endpoint to complete a task over HTTP, has the answer judged by `grade` (for the copilot: the task's hidden
tests, in the sandbox), and accepts, rejects or ignores it. The users differ in which tasks they ask for, how long they wait, how much they
read and how fast they react. They misjudge 5% of answers by default, and their feedback is delayed and sometimes sent twice. The true
judgement (`true_pass`) stays on this side: the endpoint sees only the noisy feedback.

The calls use only the public OpenAI API and `POST /v1/feedback`, like any product. Every failure becomes a `Failed` with a short kind, for
counting.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import aiohttp
from pydantic import BaseModel, Field

from ostinato.core.retry import RetryPolicy, retry
from ostinato.demo.tasks import TaskPrompt

# ---------------------------------------------------------------- HTTP calls


MAX_ANSWER_CHARS = 20_000


class Failed(Exception):
    """A failed call. `kind` is for counting: "http 503", "connection", "no [DONE]", ..."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(slots=True, kw_only=True)
class Suggestion:
    r"""A streamed completion as the user saw it.

    `turn` is the id to send feedback for; `arm` and `policy` (version) tell which model answered.

    Example: ``Suggestion(turn="chatcmpl-1:0", arm="live", policy=3, text="\n    return a + b", done=True)``
    """

    turn: str = ""
    arm: str = ""
    policy: int = -1
    text: str = ""
    done: bool = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Apply one event of the stream. Raises Failed for an error event or an answer that is too long."""
        if "error" in event:
            error: Any = event["error"]
            code: Any = (error.get("code") or error.get("type")) if isinstance(error, dict) else error
            raise Failed(f"stream error {code}")
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                self.text += text
        extra = event.get("ostinato")
        if extra:
            self.turn = extra["turns"][0]
            self.arm = extra["arm"]
            if extra["spans"]:
                self.policy = extra["spans"][-1][0]
        self.turn = self.turn or f"{event['id']}:0"
        if len(self.text) > MAX_ANSWER_CHARS:
            raise Failed("answer too long")


def body(prompt: TaskPrompt, user: str, model: str) -> dict[str, Any]:
    """Return the chat completion request for a prompt."""
    return {
        "model": model,
        "user": user,
        "messages": list(prompt.messages),
        "stream": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": prompt.max_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop": list(prompt.stop),
    }


async def ask(http: aiohttp.ClientSession, request: Mapping[str, Any]) -> Suggestion:
    """Stream one completion to its end. Cancellation closes the connection, like a person who walks away. Raises Failed."""
    answer = Suggestion()
    try:
        async with http.post("/v1/chat/completions", json=request) as response:
            if response.status != 200:
                raise Failed(f"http {response.status}")
            answer.turn = response.headers.get("X-Ostinato-Turn", "").split(",")[0]
            answer.arm = response.headers.get("X-Ostinato-Arm", "")
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    answer.done = True
                    break
                answer.take(json.loads(data))
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise Failed(f"connection {type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Failed("malformed stream") from error
    if not answer.done:
        raise Failed("no [DONE]")
    return answer


async def send_feedback(http: aiohttp.ClientSession, event: Mapping[str, Any]) -> None:
    """Post one feedback event. The event's id is an idempotency key, so retries are harmless. Raises Failed."""
    try:
        async with http.post("/v1/feedback", json=event) as response:
            if response.status not in (200, 202):
                raise Failed(f"feedback http {response.status}")
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise Failed(f"feedback connection {type(error).__name__}") from error


# ---------------------------------------------------------------- the users


class UserTask(Protocol):
    """A task that a simulated user can ask for: the copilot's `Blank` or the tab completion's `Line`."""

    @property
    def id(self) -> str:
        """The task's unique name."""
        ...

    @property
    def family(self) -> str:
        """The group that the task belongs to."""
        ...

    @property
    def prompt(self) -> TaskPrompt:
        """The prompt for the task."""
        ...

    def shows(self, text: str) -> bool:
        """Return True if this answer shows the user anything; otherwise it cannot be judged."""
        ...


W = TypeVar("W", bound=UserTask)

Grade = Callable[[W, str], Awaitable[float]]
"""(task, answer) -> 1.0 if the answer is what the user wanted, else 0.0."""


class UsersConfig(BaseModel, frozen=True, extra="forbid"):
    """The number and the behaviour of the simulated users."""

    count: int = Field(default=50, ge=1, description="Number of simulated users.")
    streams_per_user: int = Field(default=1, ge=1, le=64, description="Most open requests per user.")
    think_s: float = Field(default=0.5, ge=0, description="Mean pause between a user's requests, in seconds.")
    reaction_s: float = Field(
        default=1.5, ge=0, description="Mean time from seeing an answer to sending feedback, in seconds."
    )
    late_share: float = Field(default=0.1, ge=0, le=1, description="Share of feedback that comes much later.")
    late_s: float = Field(default=6.0, ge=0, description="Longest extra delay of late feedback, in seconds.")
    duplicate_share: float = Field(
        default=0.1, ge=0, le=1, description="Share of feedback that is sent twice, with the same id."
    )
    ignore_share: float = Field(default=0.05, ge=0, le=1, description="Share of answers that get no feedback.")
    noise: float = Field(default=0.05, ge=0, le=1, description="Share of judgements that are flipped.")
    patience_s: tuple[float, float] = Field(
        default=(30.0, 90.0), description="Shortest and longest wait for an answer, in seconds."
    )
    patience_chars: tuple[int, int] = Field(
        default=(140, 400), description="Fewest and most characters that a user reads."
    )
    grading: int = Field(default=2, ge=1, description="Answers graded at once.")
    attempts: int = Field(default=3, ge=1, description="Attempts to send a feedback event before giving up.")
    model: str = Field(default="ostinato", description="Model name to ask for.")
    api_key: str | None = Field(default=None, description="Bearer key, if the endpoint needs one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedUser:
    """One simulated user.

    `families`: the task families that the user asks for, the favourite first. `patience_s`: the longest wait for an answer.
    `patience_chars`: the longest answer that the user reads. `pace` scales think and reaction times.

    Example: ``SimulatedUser(id="sim-07", families=("sorting", "sets"), patience_s=41.0, patience_chars=180, pace=0.8)``
    """

    id: str
    families: tuple[str, ...]
    patience_s: float
    patience_chars: int
    pace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """The outcome of one request.

    `kind` is accepted, rejected, ignored, silent (nothing was suggested), abandoned (too slow) or failed; `detail` says how it
    failed. `true_pass` is the noise-free judgement, None if there was nothing to judge. `at` is seconds since the start of the run.
    """

    at: float
    user: str
    task: str
    kind: str
    detail: str = ""
    arm: str = ""
    policy: int = -1
    turn: str = ""
    true_pass: bool | None = None


@dataclass(slots=True, kw_only=True)
class UserStats:
    """Statistics of a run, from the simulated users' side. `failures`: failed requests and feedback calls, by kind. `flipped`: wrong
    judgements.
    """

    outcomes: list[RequestOutcome] = field(default_factory=list[RequestOutcome])
    failures: Counter[str] = field(default_factory=Counter[str])
    asked: int = 0
    flipped: int = 0

    def acceptance(self, arm: str | None = None) -> float | None:
        """Return the acceptance rate, accepted / (accepted + rejected), of one arm or of all; None before the first judgement."""
        kinds = Counter(outcome.kind for outcome in self.outcomes if arm is None or outcome.arm == arm)
        judged = kinds["accepted"] + kinds["rejected"]
        return kinds["accepted"] / judged if judged else None


def make_users(tasks: Sequence[UserTask], config: UsersConfig, seed: int) -> list[SimulatedUser]:
    """Return users who each prefer a few task families. The order of `tasks` is the order of popularity."""
    dice = random.Random(f"{seed}/users")
    families = list(dict.fromkeys(task.family for task in tasks))
    popularity = [1.0 / (rank + 4) for rank in range(len(families))]
    users: list[SimulatedUser] = []
    for number in range(config.count):
        chosen = dict.fromkeys(dice.choices(families, popularity, k=8))
        users.append(make_user(number, tuple(chosen), config, dice))
    return users


def make_user(number: int, families: tuple[str, ...], config: UsersConfig, dice: random.Random) -> SimulatedUser:
    """Return a user with these preferences and random patience and pace."""
    return SimulatedUser(
        id=f"sim-{number:02d}",
        families=families,
        patience_s=dice.uniform(*config.patience_s),
        patience_chars=dice.randint(*config.patience_chars),
        pace=dice.uniform(0.6, 1.6),
    )


class _UserRun(Generic[W]):
    """The shared state of one run: the HTTP session, the limit on concurrent grading, and the statistics."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        tasks: Sequence[W],
        grade: Grade[W],
        seconds: float,
        seed: int,
        config: UsersConfig,
        on_event: Callable[[RequestOutcome], None],
    ) -> None:
        self.stats = UserStats()
        self._http = http
        self._grade = grade
        self._seed = seed
        self._config = config
        self._on_event = on_event
        self._started = time.monotonic()
        self._seconds = seconds
        self._graders = asyncio.Semaphore(config.grading)
        self._by_family: dict[str, list[W]] = {}
        for task in tasks:
            self._by_family.setdefault(task.family, []).append(task)

    async def live(self, user: SimulatedUser, stream: int, background: asyncio.TaskGroup) -> None:
        """Run one of a user's request streams until the time is over. A request in flight is finished."""
        dice = random.Random(f"{self._seed}/{user.id}/{stream}")
        await asyncio.sleep(dice.uniform(0, self._config.think_s) * user.pace)
        number = 0
        while self._now() < self._seconds:
            task = self._pick(user, dice)
            number += 1
            outcome = await self._request(user, task, f"{user.id}-{self._seed}-{stream}-{number}", dice, background)
            self.stats.outcomes.append(outcome)
            self._on_event(outcome)
            pause = dice.expovariate(1.0) * self._config.think_s * user.pace
            if outcome.kind == "failed":
                pause += 0.5  # do not hammer an endpoint that is restarting
            await asyncio.sleep(min(pause, max(0.0, self._seconds - self._now())))

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _pick(self, user: SimulatedUser, dice: random.Random) -> W:
        """Draw a task. The favourite family and each family's first tasks are more likely."""
        family = dice.choices(user.families, [1.0 / (rank + 2) for rank in range(len(user.families))])[0]
        tasks = self._by_family[family]
        return dice.choices(tasks, [1.0 / (rank + 2) for rank in range(len(tasks))])[0]

    async def _request(
        self, user: SimulatedUser, task: W, key: str, dice: random.Random, background: asyncio.TaskGroup
    ) -> RequestOutcome:
        self.stats.asked += 1
        try:
            async with asyncio.timeout(user.patience_s):
                answer = await ask(self._http, body(task.prompt, user.id, self._config.model))
        except TimeoutError:
            return RequestOutcome(at=self._now(), user=user.id, task=task.id, kind="abandoned")
        except Failed as failure:
            self.stats.failures[failure.kind] += 1
            return RequestOutcome(at=self._now(), user=user.id, task=task.id, kind="failed", detail=failure.kind)
        kind, passed = "silent", None
        if task.shows(answer.text):
            async with self._graders:
                passed = await self._grade(task, answer.text) >= 1.0
            kind = self._judge(user, answer, passed, dice)
        if kind in ("accepted", "rejected"):
            background.create_task(self._feedback(user, answer.turn, kind, key, dice))
        return RequestOutcome(
            at=self._now(),
            user=user.id,
            task=task.id,
            kind=kind,
            arm=answer.arm,
            policy=answer.policy,
            turn=answer.turn,
            true_pass=passed,
        )

    def _judge(self, user: SimulatedUser, answer: Suggestion, passed: bool, dice: random.Random) -> str:
        """Return the user's judgement. Too long an answer is rejected; some answers are ignored, and some judgements are flipped."""
        if dice.random() < self._config.ignore_share:
            return "ignored"
        liked = passed and len(answer.text) <= user.patience_chars
        if dice.random() < self._config.noise:
            self.stats.flipped += 1
            liked = not liked
        return "accepted" if liked else "rejected"

    async def _feedback(self, user: SimulatedUser, turn: str, kind: str, key: str, dice: random.Random) -> None:
        """Send the judgement after the reaction time, sometimes much later, sometimes twice with the same id."""
        delay = dice.expovariate(1.0) * self._config.reaction_s * user.pace
        if dice.random() < self._config.late_share:
            delay += dice.uniform(0, self._config.late_s)
        twice = dice.random() < self._config.duplicate_share
        event: dict[str, object] = {"id": key, "target": turn, "name": kind, "value": 1.0, "source": "human"}
        await asyncio.sleep(delay)
        if await self._deliver(event) and twice:
            await self._deliver(event)

    async def _deliver(self, event: dict[str, object]) -> bool:
        def failed(failure: Failed) -> None:
            self.stats.failures[failure.kind] += 1

        try:
            policy = RetryPolicy(pause_s=0.5, attempts=self._config.attempts)
            await retry(lambda: send_feedback(self._http, event), policy, on=Failed, failed=failed)
        except Failed:
            return False
        return True


async def run_users(
    base_url: str,
    users: Sequence[SimulatedUser],
    tasks: Sequence[W],
    grade: Grade[W],
    seconds: float,
    seed: int,
    config: UsersConfig,
    on_event: Callable[[RequestOutcome], None],
) -> UserStats:
    """Run the simulated users for some time. Requests in flight at the end are finished, and their feedback is delivered.

    Args:
        base_url: the endpoint, such as "http://127.0.0.1:8000".
        users: from `make_users` with the same tasks.
        tasks: the tasks that users may ask for (the users' side of `split`).
        grade: judges whether an answer is what the user wanted.
        seconds: no requests are started after this time.
        seed: seeds all randomness of the users, but not the endpoint's answers.
        config: the users' behaviour.
        on_event: called once per request, for the live display; must not block.

    A failed request never ends the run: it is counted in `UserStats.failures`. Errors of `grade` (such as SandboxRefused) end the run as an
    ExceptionGroup. Cancellation stops everything at once.
    """
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url, headers=headers, timeout=timeout, connector=connector) as http:
        crowd = _UserRun(http, tasks, grade, seconds, seed, config, on_event)
        async with asyncio.TaskGroup() as group:
            for user in users:
                for stream in range(config.streams_per_user):
                    group.create_task(crowd.live(user, stream, group))
    return crowd.stats
