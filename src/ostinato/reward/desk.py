"""The reward desk: reads turns and signals from the log, writes rewards, reasons and batches back, and gives the trainer samples.

It owns no files. Everything it knows is a fold of the log (`ledger.py`), and it learns of its own rows by reading them back, so a
desk that was killed and started again decides exactly as one that was not.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

from ostinato.core.errors import BadConfig, Conflict, Corrupt, NoSignal
from ostinato.core.lineage import Lineage
from ostinato.core.records import Advantages, Batch, Holdback, NoReward, PolicyVersion, Reward, Row, Signal, Turn
from ostinato.core.samples import Sample, TrainingBatch
from ostinato.core.seams import Clock, Cursor, Log, RewardFn
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import Baseline, credit
from ostinato.reward.ledger import Rewarded, TurnLedger

CHUNK = 1000  # rows per append: a backlog after a restart must not become one giant transaction


class RewardDesk:
    """Turns the log into samples and accounts for every turn. One desk per log: the trainer's lock sees to it.

    `numerics` is the id of the only contract whose turns may be trained on; None: any.

    Example::

        desk = RewardDesk(log, load("ostinato.reward.functions:copilot"), clock, RewardConfig())
        made = await desk.batch(step=1, size=144, reference=v0)  # None until 144 turns are ready
    """

    def __init__(
        self, log: Log, fn: RewardFn, clock: Clock, config: RewardConfig | None = None, *, numerics: str | None = None
    ) -> None:
        self._log = log
        self._fn = fn
        self._clock = clock
        self._config = config or RewardConfig()
        self._numerics = numerics
        self._ledger = TurnLedger(Baseline(self._config.baseline))
        self._cursor: Cursor = 0
        self._asked: dict[str, tuple[float, int]] = {}  # unrewarded turn -> (ask again at, signals seen when asked)
        self._reading = asyncio.Lock()

    @property
    def baseline(self) -> Baseline:
        """As folded from the batches read so far."""
        return self._ledger.baseline

    @property
    def lineage(self) -> Lineage:
        """Where the trainer last went back to, as of the batches read so far."""
        return self._ledger.lineage

    @property
    def last_step(self) -> int:
        """The step of the newest batch read; 0 before the first."""
        return self._ledger.last_batch.step if self._ledger.last_batch else 0

    async def poll(self) -> list[Reward]:
        """Read what is new; write the rewards that are due and the reasons that are known. Returns the new rewards.

        Raises:
            BadConfig: the reward function's answer cannot be used.
            StorageFull: nothing was written; call again when there is room.
        """
        now = self._clock()
        await self._catch_up()  # after the look at the clock: a signal that the clock lets in must have been readable
        held = [Holdback(turn=turn, reason=reason, at=now) for turn, reason in self._ledger.to_hold.items()]
        settled = now - self._config.settle_s
        answers = [self._ask(turn, settled) for turn in self._ledger.unrewarded.values()]
        rewards = [reward for reward in answers if reward is not None]
        await self._write([*held, *rewards])
        return rewards

    async def ready(self, steps: int, size: int, base: PolicyVersion | None = None) -> list[Rewarded]:
        """The newest `size` turns or fewer, in log order, for a trainer that took `steps` steps (and now goes back to `base`, if given).

        The newest, because where people are served faster than the trainer learns, a queue would make every batch stale. What is
        left over is held back once it is too stale: ``stale:<lag>``. What was made under a contract that may not be trained on
        is held back at once, ``numerics:<id>``: here and not when it is read, because a recorded batch stays what it is when the
        trainer's own contract changes.
        """
        now = self._clock()
        lineage = self._ledger.lineage if base is None else Lineage(first=steps + 1, base=base.number)
        fresh: list[Rewarded] = []
        held: list[Row] = []
        for entry in sorted(self._ledger.matured.values(), key=lambda entry: entry.seq):
            lag = 0 if entry.turn.oldest is None else lineage.lag(steps, entry.turn.oldest)
            if self._numerics is not None and entry.turn.numerics != self._numerics:
                held.append(Holdback(turn=entry.turn.id, reason=f"numerics:{entry.turn.numerics or 'unknown'}", at=now))
            elif lag > self._config.max_staleness:
                held.append(Holdback(turn=entry.turn.id, reason=f"stale:{lag}", at=now))
            else:
                fresh.append(entry)
        await self._write(held)
        return fresh[-size:]

    async def batch(
        self, step: int, size: int, reference: PolicyVersion, base: PolicyVersion | None = None
    ) -> TrainingBatch | None:
        """The samples of optimizer step `step` (from 1), recorded in the log before they are returned; None if too few are ready.

        A step that the log already holds is returned as recorded: a killed step is taken again alike. The trainer's version
        before step n is n - 1, which is what staleness is measured against, or `base` if the trainer goes back to that first.

        Raises:
            NoSignal: the turns would teach nothing; they are held back as ``no_signal: <why>``, and the step can be asked again.
            Conflict: a step is missing before this one, or another desk wrote this step.
        """
        await self.poll()
        if step <= self.last_step:
            return await self._recorded(step)
        if step != self.last_step + 1:
            raise Conflict(f"step {step} was asked for, but the log's last batch is {self.last_step}; ask for the next")
        entries = await self.ready(step - 1, size, base)
        if len(entries) < size:
            return None
        batch = Batch(
            step=step,
            turns=tuple(entry.turn.id for entry in entries),
            credits=tuple(await self._credits(entries)),
            reference=reference,
            at=self._clock(),
            base=base,
        )
        await self._write([batch])
        if self._ledger.last_batch != batch:
            raise Conflict(f"another process wrote batch {step}; only one trainer may use a log: stop the other")
        return _training_batch(batch, {entry.turn.id: (entry.turn, entry.reward) for entry in entries})

    async def history(self, after_step: int = 0) -> AsyncIterator[TrainingBatch]:
        """The recorded batches with a step above `after_step`, oldest first: what a restarted trainer replays.

        Raises Corrupt if a batch names a turn that the log does not hold.
        """
        turns: dict[str, Turn] = {}
        known: dict[str, tuple[Turn, Reward]] = {}
        async for _, row in self._log.read(0, {Turn, Reward, Holdback, Batch}):
            if isinstance(row, Turn):
                turns[row.id] = row
            elif isinstance(row, Holdback):
                turns.pop(row.turn, None)
                known.pop(row.turn, None)
            elif isinstance(row, Reward):
                if (turn := turns.pop(row.turn, None)) is not None:
                    known[row.turn] = (turn, row)
            elif isinstance(row, Batch):
                if row.step > after_step:
                    yield _training_batch(row, known)
                for turn_id in row.turns:
                    known.pop(turn_id, None)

    async def _recorded(self, step: int) -> TrainingBatch:
        async for batch in self.history(step - 1):
            return batch
        raise Corrupt(f"the log's batch {step} has vanished; restore the log")

    async def _credits(self, entries: Sequence[Rewarded]) -> list[Advantages]:
        try:
            scalars = credit(
                [entry.reward.value for entry in entries],
                [self.baseline.predict(entry.turn) for entry in entries],
                [entry.turn.user for entry in entries],
                cap=self._config.user_cap,
            )
        except NoSignal as error:
            now = self._clock()
            await self._write([Holdback(turn=e.turn.id, reason=f"no_signal: {error}", at=now) for e in entries])
            raise
        return [(scalar,) * len(entry.turn.sampled_ids) for scalar, entry in zip(scalars, entries, strict=True)]

    def _ask(self, turn: Turn, now: float) -> Reward | None:
        """Ask the reward function if the time has come or a signal has; None while the answer is Pending."""
        signals = self._ledger.signals(turn.id)
        until, seen = self._asked.get(turn.id, (-math.inf, -1))
        if now < until and len(signals) == seen:
            return None
        answer = self._fn(turn, signals, now)
        if isinstance(answer, NoReward):
            raise BadConfig(f"the reward function has no reward for {turn.id} ({answer.reason})")
        if not isinstance(answer, Reward):
            self._asked[turn.id] = (answer.until, len(signals))
            return None
        if answer.turn != turn.id or not math.isfinite(answer.value):
            raise BadConfig(
                f"the reward function {answer.function} made {answer.value} for {answer.turn} of turn {turn.id}"
            )
        self._asked.pop(turn.id, None)
        return answer

    async def _write(self, rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), CHUNK):
            await self._log.append(*rows[start : start + CHUNK])
        if rows:
            await self._catch_up()

    async def _catch_up(self) -> None:
        async with self._reading:
            async for seq, row in self._log.read(self._cursor, {Turn, Signal, Reward, Holdback, Batch}):
                self._ledger.apply(seq, row)
                self._cursor = seq


def _training_batch(batch: Batch, known: dict[str, tuple[Turn, Reward]]) -> TrainingBatch:
    missing = [turn_id for turn_id in batch.turns if turn_id not in known]
    if missing:
        raise Corrupt(f"batch {batch.step} names turn {missing[0]}, which the log does not hold; restore the log")
    samples = (
        Sample(turn=known[turn_id][0], reward=known[turn_id][1].value, advantages=advantages)
        for turn_id, advantages in zip(batch.turns, batch.credits, strict=True)
    )
    return TrainingBatch(row=batch, samples=tuple(samples))
