"""Synthetic traffic, as rows of the log: conversations, people's feedback, and the rows of the reward desk and the release worker.

People (`users` of `tenants`) hold conversations of `episode` turns; each turn's new message has about `prompt` tokens, its answer
`tokens`. Each prompt begins with the tenant's system prompt, followed by the tokens of the earlier turns. Some calls ask for
several answers. Token ids are drawn independently from a Zipf distribution, so they hold no phrases that a compressor could find,
and log-probabilities are random floats of which half lie near 0. Real traffic therefore compresses better.

Every turn is delivered, some get a signal, all get a reward when they are mature, and each ends in a batch or is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ostinato.core.records import (
    Arm,
    Batch,
    Delivered,
    Finish,
    Holdback,
    PolicyVersion,
    ReleaseEvent,
    Reward,
    Row,
    Sampling,
    Signal,
    Source,
    Span,
    Turn,
)

VOCABULARY = 49_152
DRAWN = 200_000  # random numbers drawn per block
START = 1_760_000_000.0
OPEN_TALKS = 500
REACTION_S, MATURE_S = 20.0, 31.0  # after the call
CALL_S = 0.05  # between two calls
RELEASE_EVERY = 20_000  # turns
LETTERS = "ABCDEFGHIJKLMNOP"
"""The alphabet of names and hashes, four bits per letter. Nothing else in a row uses it, so names can be replaced in the row's bytes."""


@dataclass(frozen=True)
class Shape:
    """The traffic's parameters. Token counts are means."""

    tenants: int = 10
    users: int = 10_000
    tokens: int = 100
    prompt: int = 60
    system: int = 120
    episode: int = 4
    choices: int = 4
    several: float = 0.05  # share of calls that ask for `choices` answers
    signals: float = 0.3
    control: float = 0.1
    stale: float = 0.1
    batch: int = 64
    seed: int = 0


class Draws:
    """Token ids, log-probabilities and names, drawn in large blocks and handed out in pieces."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        weight = 1.0 / (np.arange(VOCABULARY) + 40.0)
        self._cumulated = np.cumsum(weight / weight.sum())
        self._ids, self._id = list[int](), 0
        self._logprobs, self._logprob = list[float](), 0
        self.pieces = [f" {self._random.integers(26**4):x}" if i % 3 else f"{i % 97:x}" for i in range(VOCABULARY)]

    def ids(self, count: int) -> list[int]:
        if self._id + count > len(self._ids):
            drawn = np.searchsorted(self._cumulated, self._random.random(DRAWN + count))
            self._ids, self._id = np.minimum(drawn, VOCABULARY - 1).tolist(), 0
        self._id += count
        return self._ids[self._id - count : self._id]

    def logprobs(self, count: int) -> list[float]:
        if self._logprob + count > len(self._logprobs):
            size = DRAWN + count
            near = 10.0 ** self._random.uniform(-6, -2, size)
            far = self._random.exponential(1.5, size)
            drawn = -np.where(self._random.random(size) < 0.5, near, far)
            self._logprobs, self._logprob = drawn.astype("f4").tolist(), 0
        self._logprob += count
        return self._logprobs[self._logprob - count : self._logprob]

    def name(self, letters: int = 32) -> str:
        return self._random.bytes(letters // 2).hex().translate(_TO_LETTERS)

    def length(self, mean: int) -> int:
        """A random length from half the mean to one and a half times the mean."""
        return int(self._random.integers(mean // 2, mean + mean // 2 + 1)) if mean else 0

    def below(self, bound: int) -> int:
        return int(self._random.integers(bound))

    def chance(self, share: float) -> bool:
        return bool(self._random.random() < share)


_TO_LETTERS = str.maketrans("0123456789abcdef", LETTERS)


@dataclass(slots=True)
class Talk:
    """An open conversation."""

    tenant: str
    user: str
    episode: str
    ids: tuple[int, ...]
    parent: str | None = None
    turns: int = 0


class Traffic:
    """One stretch of traffic. `rows` counts the rows handed out, and `now` is the time of the last call.

    Example: ``for rows in Traffic(Shape(), Draws(0)).calls(1000): ...``
    """

    def __init__(self, shape: Shape, draws: Draws, start: float = START, policy: int = 0, steps: int = 0) -> None:
        self.turns = self.rows = self.releases = 0
        self.now = start
        self.steps = steps
        self.policy = PolicyVersion(number=policy, hash=draws.name(64))
        self._shape = shape
        self._draws = draws
        self._systems = [tuple(draws.ids(shape.system)) for _ in range(shape.tenants)]
        self._talks: list[Talk] = []
        self._signals: deque[Signal] = deque()
        self._undecided: deque[tuple[float, Turn, tuple[str, ...]]] = deque()
        self._ready: list[Turn] = []

    def calls(self, turns: int) -> Iterator[list[Row]]:
        """Yield calls until there are `turns` more turns. Each call comes with its own rows and the other rows due by then."""
        end = self.turns + turns
        while self.turns < end:
            self.now += CALL_S
            yield self._counted([*self._call(), *self._due(self.now)])

    def finish(self) -> Iterator[list[Row]]:
        """Yield the remaining rows about all turns, until each is in a batch or held back."""
        self.now += 2 * MATURE_S
        while rows := self._due(self.now, most=500):
            yield self._counted(rows)
        if self._ready:
            yield self._counted([self._batch()])

    def _counted(self, rows: list[Row]) -> list[Row]:
        self.rows += len(rows)
        return rows

    # ------------------------------------------------------------ serving

    def _call(self) -> list[Row]:
        shape, draws = self._shape, self._draws
        talk = self._talk()
        prompt = talk.ids + tuple(draws.ids(draws.length(shape.prompt)))
        name, count = f"chatcmpl-{draws.name()}", shape.choices if draws.chance(shape.several) else 1
        turns = [self._answer(talk, prompt, f"{name}:{i}") for i in range(count)]
        rows: list[Row] = [
            *turns,
            Delivered(id=draws.name(16), turns=tuple(turn.id for turn in turns), at=self._soon(1)),
        ]
        for turn in turns:
            said = [self._judged(turn)] if draws.chance(shape.signals) else []
            self._signals.extend(said)
            self._undecided.append((self.now + MATURE_S, turn, tuple(signal.id for signal in said)))
        before, self.turns = self.turns, self.turns + count
        if self.turns // RELEASE_EVERY > before // RELEASE_EVERY:
            rows += self._release()
        talk.ids, talk.parent, talk.turns = prompt + turns[0].sampled_ids, turns[0].id, talk.turns + 1
        if talk.turns >= shape.episode:
            self._talks.remove(talk)
        return rows

    def _talk(self) -> Talk:
        if len(self._talks) >= OPEN_TALKS:
            return self._talks[self._draws.below(len(self._talks))]
        user = self._draws.below(self._shape.users)
        tenant = user % self._shape.tenants
        talk = Talk(f"tenant-{tenant}", f"user-{user}", f"ep-{self._draws.name()}", self._systems[tenant])
        self._talks.append(talk)
        return talk

    def _answer(self, talk: Talk, prompt: tuple[int, ...], name: str) -> Turn:
        draws = self._draws
        sampled = tuple(draws.ids(max(1, draws.length(self._shape.tokens))))
        return Turn(
            id=name,
            episode=talk.episode,
            parent=talk.parent,
            user=talk.user,
            tenant=talk.tenant,
            arm=Arm.CONTROL if draws.chance(self._shape.control) else Arm.LIVE,
            propensity=0.9,
            prompt_ids=prompt,
            sampled_ids=sampled,
            logprobs=tuple(draws.logprobs(len(sampled))),
            spans=(Span(policy=self.policy, tokens=len(sampled)),),
            sampling=Sampling(max_tokens=512, seed=draws.below(1 << 62)),
            finish=Finish.STOP,
            text="".join(map(draws.pieces.__getitem__, sampled)),
            started_at=self._soon(0),
            ended_at=self._soon(1),
            numerics="5f0c2b7a91d3e846",
        )

    def _judged(self, turn: Turn) -> Signal:
        at = self._soon(REACTION_S)
        return Signal(
            id=self._draws.name(),
            tenant=turn.tenant,
            turn=turn.id,
            name="accepted" if self._draws.chance(0.6) else "undone",
            value=1.0,
            source=Source.HUMAN,
            occurred_at=at,
            received_at=at + 0.25,
        )

    def _soon(self, seconds: float) -> float:
        return self.now + seconds + self._draws.below(1 << 20) / 1e6

    # ------------------------------------------------------------ signals, rewards and batches

    def _due(self, now: float, most: int = 1 << 30) -> list[Row]:
        rows: list[Row] = []
        while self._signals and self._signals[0].received_at <= now and len(rows) < most:
            rows.append(self._signals.popleft())
        while self._undecided and self._undecided[0][0] <= now and len(rows) < most and not self._waits(now):
            due, turn, said = self._undecided.popleft()
            rows += self._decided(turn, said, due, self.rows + len(rows))
        return rows

    def _waits(self, now: float) -> bool:
        """True while a signal received by `now` is not yet written. Rewards must come after it."""
        return bool(self._signals) and self._signals[0].received_at <= now

    def _decided(self, turn: Turn, said: tuple[str, ...], at: float, upto: int) -> list[Row]:
        value = 0.75 if said and self._draws.chance(0.6) else -0.25 if said else 0.0
        rows: list[Row] = [Reward(turn=turn.id, value=value, function="copilot@1", signals=said, at=at, upto=upto)]
        if turn.arm is Arm.CONTROL:
            return [*rows, Holdback(turn=turn.id, reason="arm:control", at=at)]
        if self._draws.chance(self._shape.stale):
            return [*rows, Holdback(turn=turn.id, reason="stale:9", at=at)]
        self._ready.append(turn)
        return [*rows, self._batch()] if len(self._ready) == self._shape.batch else rows

    def _batch(self) -> Batch:
        turns, self._ready = self._ready, []
        credits = tuple((self._draws.below(1 << 20) / 1e5 - 5.0,) * len(turn.sampled_ids) for turn in turns)
        self.steps += 1
        return Batch(
            step=self.steps,
            turns=tuple(turn.id for turn in turns),
            credits=credits,
            reference=self.policy,
            at=self.now,
        )

    def _release(self) -> list[Row]:
        """A candidate is measured and shipped."""
        before, self.policy = self.policy, PolicyVersion(number=self.policy.number + 1, hash=self._draws.name(64))
        self.releases += 1
        report = {"verdict": "SHIP", "items": 120, "draws": 1200, "mean": 0.021, "lower": -0.004, "scores": [0.5] * 120}
        return [
            ReleaseEvent(
                id=f"{action}-{self._draws.name(16)}",
                action=action,
                policy=self.policy,
                previous=before,
                reason="better than the margin",
                detail={"report": report} if action == "evaluated" else {},
                at=self.now,
            )
            for action in ("evaluated", "shipped")
        ]
