"""The reward desk: reads turns and signals from the log, writes rewards, reasons and batches back, and gives the trainer samples.

Its only file is a snapshot of its fold of the log (`log_fold.py`). It learns of its own rows by reading them back, so a desk that was
killed and restarted decides exactly as one that was not.

The order of the log decides about a turn: its reward is based on the signals up to row `Reward.upto`, the last row that the desk had
read. Reading the log up to that row and calling the function again gives the same reward.

`DeskSource` is the desk's interface for the training loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ostinato.core.errors import Conflict, Corrupt, NoSignal, StorageFull
from ostinato.core.held_out import HeldOutPrompts
from ostinato.core.notices import AlarmState
from ostinato.core.records import Batch, Holdback, PolicyVersion, Reward, RewardReach, Row, Signal, Source, Turn
from ostinato.core.samples import EpisodeKey, LaterReturns, Sample, TrainingBatch
from ostinato.core.seams import Clock, Credit, Folds, Log
from ostinato.core.staleness import Lineage
from ostinato.core.verdicts import BELIEF, belief_id
from ostinato.reward import batching
from ostinato.reward.alarms import FUNCTION, LATE_FUNCTION
from ostinato.reward.batching import ChosenTurns, LearnablePart
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import BeliefWeighted, ByOrigin, GroupRelative, SingleRollout, by_episode, of_world
from ostinato.reward.demonstrations import AnswerIds, corrections_of, demonstration_weights, demonstrations
from ostinato.reward.hints import HintSource, HintTokens
from ostinato.reward.ledger import (
    GONE,
    HELD_OUT,
    NO_SIGNAL,
    PASSED_OVER,
    STALE,
    STALE_TURN,
    TOO_FEW,
    UNTAKEN,
    TurnLedger,
    returns_of,
)
from ostinato.reward.ledger_entries import Gold, Matured, Taught, TurnFacts, Unit, no_gold
from ostinato.reward.line_credit import TokenBytes, TurnLines, turn_lines
from ostinato.reward.log_fold import LedgerFollower
from ostinato.reward.protocol import Asker, Unloadable
from ostinato.reward.recent_shares import masses_of, turn_scales, turn_weights
from ostinato.reward.scheduler import RewardScheduler
from ostinato.reward.surrogate import SurrogateQuality

# ---------------------------------------------------------------- recorded batches


async def recorded(
    log: Log, first: int, last: int, answer_ids: AnswerIds | None = None, hints: HintSource | None = None
) -> AsyncIterator[TrainingBatch]:
    """Yield the recorded batches of steps `first` to `last`, in order, without corrections if `answer_ids` is None and without hints if
    `hints` is.

    Raises Corrupt if a batch, or one of its turns or rewards, is not in the log.
    """
    for step in range(first, last + 1):
        found = await log.find(Batch, [(step,)])
        if not found:
            raise Corrupt(
                f"batch {step} is no longer in the log: resume from a checkpoint of step {step} or later, or restore the log"
            )
        yield await with_samples(log, found[0], answer_ids, hints)


async def with_samples(
    log: Log, row: Batch, answer_ids: AnswerIds | None = None, hints: HintSource | None = None
) -> TrainingBatch:
    """Return a recorded batch with its samples and, if asked for, corrections and hints. Raises Corrupt if a turn or reward is missing."""
    identities = [(turn,) for turn in row.turns]
    turns, rewards = await log.find(Turn, identities), await log.find(Reward, identities)
    made = training_batch(row, turns, rewards)
    beside: list[Sample] = []
    if row.shown and answer_ids is not None:
        texts = await corrections_of(log, turns, rewards)
        beside += demonstrations(made.samples, row.shown, texts, answer_ids)
    if row.hints and hints is not None:
        beside += await hints.samples(made.samples, row.hints)
    return replace(made, samples=(*made.samples, *beside))


def training_batch(batch: Batch, turns: Sequence[Turn], rewards: Sequence[Reward]) -> TrainingBatch:
    """Return a recorded batch with its samples, in the row's order. Raises Corrupt if one of its turns or rewards is missing."""
    values = {reward.turn: reward.value for reward in rewards}
    known = {turn.id: turn for turn in turns if turn.id in values}
    missing = [turn_id for turn_id in batch.turns if turn_id not in known]
    if missing:
        raise Corrupt(f"batch {batch.step} names turn {missing[0]}, which the log does not hold; restore the log")
    ordered = [known[turn_id] for turn_id in batch.turns]
    weights = batch.weights or batch_weights(ordered, {}, even=batch.even)
    scales, ends = batch.scales or [1.0] * len(ordered), batch.after or [()] * len(ordered)
    samples = (
        Sample(
            turn=turn,
            reward=values[turn.id],
            advantages=advantages,
            weight=weight,
            summed=of_world(turn),
            scale=scale,
            cut=bool(after) and (later := LaterReturns(*after)) == later.unknown,
        )
        for turn, advantages, weight, scale, after in zip(ordered, batch.credits, weights, scales, ends, strict=True)
    )
    return TrainingBatch(row=batch, samples=tuple(samples))


def batch_weights(turns: Sequence[Turn], relative: Mapping[str, float], *, even: bool) -> list[float]:
    """Return each turn's weight in a batch. People's turns get those of `turn_weights`, times their `relative` weights, if any."""
    people = [turn for turn in turns if not of_world(turn)]
    equal = turn_weights([(turn.tenant, turn.episode) for turn in people], even=even)
    if relative:
        mean = math.fsum(relative[turn.id] for turn in people) / len(people)
        equal = [weight * relative[turn.id] / mean for turn, weight in zip(people, equal, strict=True)]
    simulated = iter(turn_weights([(turn.tenant, turn.episode) for turn in turns if of_world(turn)], even=False))
    served = iter(equal)
    return [next(simulated if of_world(turn) else served) for turn in turns]


# ---------------------------------------------------------------- credit as of a place in the log


@dataclass(frozen=True, slots=True)
class BatchCredit:
    """Computes the credit of the turns of batches, as of the rows that a ledger has read. For its fields see `RewardDesk`.

    Example: ``row = await BatchCredit(log, Taught(), None, None, None).give(row, ledger, found, (), {})``
    """

    log: Log
    taught: Taught
    token_bytes: TokenBytes | None
    answer_ids: AnswerIds | None
    hints: HintSource | None

    async def give(
        self,
        row: Batch,
        ledger: TurnLedger,
        found: Sequence[tuple[Turn, Matured]],
        passed: Iterable[Matured],
        after: Mapping[EpisodeKey, LaterReturns],
        like: Batch | None = None,
    ) -> Batch:
        """Return the row with the credits of its turns, its corrections, hints and people's scale factors. Raises NoSignal.

        Args:
            row: of a batch; its turns and their weights count.
            ledger: the state after the rows before it.
            found: the batch's turns.
            passed: the turns that the batch passed over.
            after: the returns of its episodes that continue.
            like: a recorded row: besides credits, only what that row has is computed; None: whatever the settings say.
        """
        config, turns, entries = ledger.config, [turn for turn, _ in found], [entry for _, entry in found]
        people = [entry.facts.source for entry in (*entries, *passed) if not entry.facts.world]
        masses = masses_of(people, even=True)
        weights = dict(zip(row.turns, row.weights, strict=True)) if row.weights else None
        lines = await turn_lines_of(self.log, self.token_bytes, found)
        outcomes = {entry.facts.id for entry in entries if entry.reach is RewardReach.EPISODE}
        single = SingleRollout(
            config, ledger.baseline, ledger.recent, weights, masses=masses, lines=lines, outcomes=outcomes
        )
        worlds: Credit = GroupRelative(equal_states=config.equal_states)
        if config.belief.strength:
            beliefs = await belief_changes_of(self.log, turns)
            worlds = BeliefWeighted(worlds, beliefs, strength=config.belief.strength, most=config.belief.most)
        credit = ByOrigin(people=single, worlds=worlds, worlds_weight=self.taught.worlds_weight, weights=weights)
        credits = credit(by_episode(turns, after), {entry.facts.id: entry.value for entry in entries})
        cuts = turn_scales(turns, masses, ledger.recent, config)
        return replace(
            row,
            credits=tuple(credits[turn.id] for turn in turns),
            shown=await self._correction_weights(turns, cuts) if like is None or like.shown else (),
            hints=await self.hints.hints(turns, credits, cuts) if self.hints and (like is None or like.hints) else (),
            scales=tuple(cuts.values()) if (self.taught.values if like is None else like.scales) else (),
        )

    async def _correction_weights(self, turns: Sequence[Turn], cuts: Mapping[str, float]) -> tuple[float, ...]:
        """Return the weight of each turn's correction, scaled down by the same factor as its author's turns."""
        if not self.taught.corrections or self.answer_ids is None:
            return ()
        rewards = await self.log.find(Reward, [(turn.id,) for turn in turns])
        texts = await corrections_of(self.log, turns, rewards)
        return demonstration_weights(turns, texts, list(cuts.values()), self.answer_ids, self.taught.corrections)


async def belief_changes_of(log: Log, turns: Sequence[Turn]) -> dict[str, float]:
    """Return by how much each turn of a simulated world changed the belief in the known answer, where its rollout reported that."""
    wanted = [(turn.tenant, belief_id(turn.id)) for turn in turns if of_world(turn)]
    said = await log.find(Signal, wanted) if wanted else []
    return {
        each.turn: min(1.0, max(-1.0, each.value))
        for each in said
        if each.name == BELIEF and each.source is Source.CODE and each.id == belief_id(each.turn)
    }


async def turn_lines_of(
    log: Log, token_bytes: TokenBytes | None, chosen: Sequence[tuple[Turn, Matured]]
) -> dict[str, TurnLines]:
    """Return the values of single lines, by turn, for rewards that have them."""
    turns = {turn.id: turn for turn, entry in chosen if entry.lines[1]}
    rewards = await log.find(Reward, [(turn,) for turn in turns]) if turns else []
    return {reward.turn: turn_lines(turns[reward.turn], reward, token_bytes) for reward in rewards}


# ---------------------------------------------------------------- the desk


CHUNK = 1000  # rows per append: a backlog after a restart must not become one giant transaction


class RewardDesk:
    """Turns the log into samples and accounts for every turn. The trainer's lock ensures one desk per log.

    Args:
        log: the log to read and write.
        asker: calls the reward function.
        clock: Unix seconds.
        config: how rewards and credit are computed.
        folds: where the desk's state is saved between starts; None: the log is read from its first row.
        numerics: the id of the only numerics contract whose turns may be trained on; None: any.
        gold: the people whose turns are never trained on.
        taught: whose turns are trained on, whether a batch of people's turns or all of them, and how many groups of rollouts per step.
        held_out: the prompts on which candidates are evaluated; turns that begin with one are never trained on.
        token_bytes: returns the bytes of a token's text; None: all tokens of a turn get the same credit.
        answer_ids: returns the tokens of a correction; None: no correction is imitated.
        hint_tokens: returns the tokens of a prompt with a hint; None: nothing is learned from hints.
        late_asker: calls the function of late rewards (`reward.surrogate`); None: none is predicted.

    Example::

        desk = RewardDesk(log, asker_of(config), clock, config, folds=folds)
        made = await desk.batch(step=1, size=144, reference=v0)  # None until 144 turns are ready
    """

    def __init__(
        self,
        log: Log,
        asker: Asker,
        clock: Clock,
        config: RewardConfig | None = None,
        *,
        folds: Folds | None = None,
        numerics: str | None = None,
        gold: Gold = no_gold,
        taught: Taught | None = None,
        held_out: HeldOutPrompts | None = None,
        token_bytes: TokenBytes | None = None,
        answer_ids: AnswerIds | None = None,
        hint_tokens: HintTokens | None = None,
        late_asker: Asker | None = None,
    ) -> None:
        self._log = log
        self._asker, self._late_asker = asker, late_asker
        self._clock = clock
        self._config = config or RewardConfig()
        self._numerics = numerics
        self._taught = taught or Taught()
        self._held_out = held_out or HeldOutPrompts()
        hints = None if hint_tokens is None else HintSource(log, self._config, hint_tokens)
        self._credit = BatchCredit(log, self._taught, token_bytes, answer_ids, hints)
        plan = f"{self._config.function} {sorted(self._config.options.items())}"
        self._reading = LedgerFollower(log, self._config, folds, plan, gold, self._taught.arms)
        self._scheduler = RewardScheduler(log, self._config, late_asker)
        self._busy = asyncio.Lock()

    @property
    def lineage(self) -> Lineage:
        """The trainer's last return to an earlier version, as of the batches read so far."""
        return self._reading.ledger.lineage

    @property
    def surrogate(self) -> Mapping[str, SurrogateQuality]:
        """How well late rewards were predicted, by tenant, as of the rows read so far."""
        return self._reading.ledger.surrogate.qualities()

    @property
    def last_step(self) -> int:
        """The step of the newest batch read; 0 before the first."""
        return self._reading.ledger.last_step

    async def catch_up(self) -> None:
        """Read the new rows, and write none. Raises Corrupt, StorageFull, Unavailable."""
        async with self._busy:
            await self._reading.catch_up()

    async def poll(self) -> None:
        """Read the new rows, and write the rewards, quarantines, holdbacks and alarms that are due.

        Raises:
            BadConfig: there is no such reward function, or its options do not suit it.
            StorageFull: not all was written; call again when there is room.
        """
        async with self._busy:
            await self._poll()

    async def turns(self, steps: int, size: int, base: PolicyVersion | None = None) -> list[Turn]:
        """Return the turns of which a batch would be made now: at least `size`, in whole episodes and groups, the newest of each tenant.

        Returns [] if there are too few. `steps` is the number of steps that the trainer has taken; it goes back to `base` now, if given.
        This also holds turns back. Turns left over are held back once they are too stale, ``stale:<lag>``, or if too few others came for a
        long time, ``too_few``. Turns sampled under another numerics contract are held back, ``numerics:<id>``: here and not when they are
        read, because a recorded batch must not change when the trainer's own contract does. So are turns whose silence is no longer
        trusted, ``coverage``, and those that are too long for a batch, ``too_long``: with long turns a batch has fewer than `size`.
        """
        async with self._busy:
            return [turn for turn, _ in (await self._fetch(steps, size, base))[0]]

    async def ready(self, steps: int, size: int, base: PolicyVersion | None = None) -> list[TurnFacts]:
        """Return the facts of `turns`, without reading the turns from the log: for a trainer that may take no step now.

        While steps are taken, waiting turns become stale, which ends their wait. Without steps, their age must end it: a unit that such
        a batch would not take is held back as ``untaken`` once its reward was due `batch_wait_s` ago. A trainer that takes steps loses
        no turns to their age.
        """
        async with self._busy:
            chosen = (await self._choose(steps, size, base)).entries
            if chosen:
                await self._give_up(UNTAKEN, "no batch took it", {entry.facts.unit for entry in chosen})
            return [entry.facts for entry in chosen]

    async def batch(
        self, step: int, size: int, reference: PolicyVersion, base: PolicyVersion | None = None
    ) -> TrainingBatch | None:
        """Make the batch of optimizer step `step` (from 1) and record it in the log before returning it; None if too few turns are ready.

        A step that the log already holds is returned as recorded, so that a killed step is repeated identically. Staleness is
        measured against the trainer's version before step n, which is n - 1, or `base` if the trainer goes back to that first.

        Raises:
            NoSignal: the turns would teach nothing; they are held back as ``no_signal: <why>``, and the step can be requested again.
            Conflict: a step is missing before this one, or another desk wrote this step.
        """
        async with self._busy:
            await self._poll()
            if step <= self.last_step:
                return await anext(self.recorded(step, step))
            if step != self.last_step + 1:
                raise Conflict(
                    f"step {step} was asked for, but the log's last batch is {self.last_step}; ask for the next"
                )
            turns, chosen = await self._fetch(step - 1, size, base)
            return await self._record(step, turns, chosen, reference, base) if turns else None

    async def history(self, after_step: int = 0) -> AsyncIterator[TrainingBatch]:
        """Yield the recorded batches with a step above `after_step`, oldest first, for a restarted trainer to replay.

        Raises Corrupt if a batch, or a turn or reward that it names, is not in the log.
        """
        await self.catch_up()
        async for batch in self.recorded(after_step + 1, self.last_step):
            yield batch

    def recorded(self, first: int, last: int) -> AsyncIterator[TrainingBatch]:
        """Yield the recorded batches of steps `first` to `last`, in order. Raises Corrupt as `history`."""
        return recorded(self._log, first, last, self._credit.answer_ids, self._credit.hints)

    async def last_batch(self) -> Batch:
        """Return the row of the newest batch. Raises Corrupt if the log has none."""
        found = await self._log.find(Batch, [(self.last_step,)])
        if not found:
            raise Corrupt(f"batch {self.last_step} is no longer in the log: restore the log")
        return found[0]

    async def restart(self, step: int, base: PolicyVersion, reference: PolicyVersion) -> Batch:
        """Record a step without turns that starts from the weights of `base`; batches recorded before it are not replayed.

        Raises Conflict if the log has another batch of this step.
        """
        row = Batch(step=step, turns=(), credits=(), reference=reference, at=self._clock(), base=base, even=True)
        async with self._busy:
            await self._log.append(row)
            await self._reading.catch_up()
            if self._reading.ledger.last_batch != row:
                raise Conflict(f"another process wrote batch {step}; only one trainer may use a log: stop the other")
        return row

    async def save(self) -> None:
        """Save a snapshot of the fold, so that the next start reads on from here. Raises StorageFull."""
        async with self._busy:
            await self._reading.save()

    async def close(self) -> None:
        """Stop the process of the reward function, if any, and save a snapshot. If the disk is full, only the snapshot is lost."""
        await self._asker.close()
        if self._late_asker is not None:
            await self._late_asker.close()
        with contextlib.suppress(StorageFull):
            await self.save()

    # ------------------------------------------------------------ rewards, quarantines and holdbacks

    async def _poll(self) -> None:
        now = self._clock()
        # the clock is read first: every signal received by then must already be readable
        await self._reading.catch_up()
        await self._settle(now)
        ledger = self._reading.ledger
        await self._learn_late(now)
        complete = True
        while complete and (due := self._scheduler.due(ledger, now)):
            try:
                rows, complete = await self._scheduler.rows(self._asker, ledger, due, now, self._reading.cursor)
            except Unloadable as error:
                await self._alarm_unloadable(str(error), now)
                rows, complete = [], False
            await self._write(rows)
            await self._settle(now)
        if not complete:
            await self._write(self._scheduler.given_up(ledger, now, self._reading.cursor))
            await self._settle(now)

    async def _learn_late(self, now: float) -> None:
        """Write the late rewards that are known now, on which the predictor is trained."""
        ledger = self._reading.ledger
        try:
            more = True
            while more:
                rows, more = await self._scheduler.late_rewards(ledger, now)
                await self._write(rows)
                await self._settle(now)
        except Unloadable as error:
            await self._alarm_unloadable(str(error), now, LATE_FUNCTION)

    async def _settle(self, now: float) -> None:
        """Write the outcomes and alarms that follow from the rows read."""
        ledger = self._reading.ledger
        later = ledger.side_calls()
        due = ((turn, reason) for turn, reason in ledger.to_hold.items() if turn not in later)
        held = [Holdback(turn=turn, reason=reason, at=now) for turn, reason in due]
        alarms = (*ledger.alarms.due(now, ledger.learnable), *ledger.surrogate.due(ledger.alarms, now))
        await self._write([*held, *alarms])

    async def _alarm_unloadable(self, why: str, now: float, function: str = FUNCTION) -> None:
        alarms = self._reading.ledger.alarms
        if function not in alarms.standing():
            await self._write([alarms.row(function, AlarmState.RAISED, why, now)])

    # ------------------------------------------------------------ batches

    async def _fetch(
        self, steps: int, size: int, base: PolicyVersion | None
    ) -> tuple[list[tuple[Turn, Matured]], ChosenTurns]:
        """Choose a batch as `_choose` does and read its turns. Turns that are erased, no longer in the log or begin with a held-out prompt
        are held back, and the choice is repeated.
        """
        while entries := (chosen := await self._choose(steps, size, base)).entries:
            turns = await self._log.find(Turn, [(entry.facts.id,) for entry in entries])
            there = {turn.id for turn in turns if not turn.redacted}
            why = {entry.facts.id: GONE for entry in entries if entry.facts.id not in there}
            why |= {turn.id: HELD_OUT for turn in turns if turn.id in there and self._held_out.covers(turn.prompt_ids)}
            if not why:
                return list(zip(turns, entries, strict=True)), chosen
            await self._hold(why, self._clock())
        return [], chosen

    async def _choose(self, steps: int, size: int, base: PolicyVersion | None) -> ChosenTurns:
        """Hold back the turns that can no longer be learned from, and choose a batch from the rest. See `turns`."""
        now, ledger = self._clock(), self._reading.ledger
        lineage = ledger.lineage if base is None else Lineage(first=steps + 1, base=base.number)
        unfit = {turn: why for turn, entry in ledger.matured.items() if (why := self._unfit(entry, lineage, steps))}
        await self._hold(self._with_groups(unfit), now)
        parts = batching.ready_parts(
            ledger.matured.values(), ledger.first_open, now=now, config=self._config, closed=ledger.closed
        )
        judged = [(part, batching.rejection_reason(part, self._config)) for part in parts]
        await self._hold({entry.facts.id: why for part, why in judged if why for entry in part.entries}, now)
        chosen = self._choose_parts([part for part, why in judged if not why], size, lineage, steps)
        if chosen is None:
            return ChosenTurns()
        if not chosen.entries:
            await self._give_up(TOO_FEW, f"no batch of {size}")
        return chosen

    def _with_groups(self, unfit: Mapping[str, str]) -> dict[str, str]:
        """Return why turns are held back, including the groups of rollouts that are held back with one of their turns. A stale turn is held
        back alone if its rollout continues after it and its own reward is 0: then the returns of the group's rollouts do not change.
        """
        ledger = self._reading.ledger
        ends = ledger.rollout_ends() if any(kind.startswith(STALE) for kind in unfit.values()) else {}
        alone: dict[str, str] = {}
        groups: dict[Unit, str] = {}
        for turn, why in unfit.items():
            entry = ledger.matured[turn]
            if entry.facts.unit[0] != "world":
                alone[turn] = why
            elif why.startswith(f"{STALE}:") and not entry.value and entry.facts.seq < ends[entry.rollout]:
                alone[turn] = why.replace(STALE, STALE_TURN, 1)
            else:
                groups[entry.facts.unit] = why
        whole = {turn: groups[each.facts.unit] for turn, each in ledger.matured.items() if each.facts.unit in groups}
        return alone | whole

    def _choose_parts(
        self, parts: Sequence[LearnablePart], size: int, lineage: Lineage, steps: int
    ) -> ChosenTurns | None:
        """Choose people's turns, if there are enough, and groups of rollouts: as many as a step takes, or fewer if people's turns are taken
        too. A group larger than a batch gets a step of its own, or every other step while people's turns are ready. Return None if the step
        should wait for more turns. Parts that the settings no longer learn from are left to become stale.
        """
        parts = [part for part in parts if (self._taught.groups if part.world else self._taught.people)]
        people = [part for part in parts if not part.world]
        served: Sequence[Matured] = batching.fair_deal(people, size=size, config=self._config, every=self._taught.every)
        oldest = min((part for part in parts if part.world), key=lambda part: part.entries[0].facts.seq, default=None)
        if oldest and oldest.tokens > self._config.batch_tokens and (not served or steps % 2):
            return ChosenTurns(entries=oldest.entries)
        draw = None
        if self._taught.every and served:
            if len(served) == sum(len(part.entries) for part in people):
                if len(served) < self._even_share(served, lineage, steps):
                    return None
            else:
                draw = self._draw(people, served, steps)
                served = draw.entries
        ids = {entry.facts.id for entry in served}
        used = sum(part.tokens for part in parts if part.first in ids)
        left = self._config.batch_tokens - used
        simulated = batching.choose_groups(
            [part for part in parts if part.world], groups=self._taught.groups, tokens=left, fewer=bool(served)
        )
        entries = sorted([*served, *simulated], key=lambda entry: entry.facts.seq)
        return ChosenTurns(entries=entries) if draw is None else replace(draw, entries=entries)

    def _draw(self, people: Sequence[LearnablePart], fair: Sequence[Matured], steps: int) -> ChosenTurns:
        """Draw a sample of people's turns, if more are ready than a step can hold."""
        baseline = self._reading.ledger.baseline
        after = self._reading.ledger.later_returns([entry for part in people for entry in part.entries])

        def noise(part: LearnablePart) -> float:
            reached = returns_of(part.entries, self._config.discount, after)
            squares = [
                (reached[each.facts.id].total - baseline.predict(each.facts.context)) ** 2 + each.spread
                for each in part.entries
            ]
            sampled = [each.facts.sampled for each in part.entries]
            return math.sqrt(sum(square * tokens for square, tokens in zip(squares, sampled, strict=True)))

        seed = f"{steps} {fair[0].facts.id}"
        return batching.draw_batch(
            people, {entry.facts.id for entry in fair}, noise=noise, most=self._config.batch_tokens, seed=seed
        )

    def _even_share(self, served: Sequence[Matured], lineage: Lineage, steps: int) -> float:
        """Return a step's even share of people's trainable turns other than these, in turns: a turn that k more steps can take before it is
        too stale counts 1 / k. 0 if every step makes all of them too stale, since then waiting gains nothing.
        """
        ledger, most = self._reading.ledger, self._config.max_staleness
        if most == 0:
            return 0.0
        taken = {entry.facts.id for entry in served}
        waiting = (entry.facts for entry in (*ledger.open.values(), *ledger.matured.values()))
        lags = (
            facts.lag(lineage, steps)
            for facts in waiting
            if facts.hold is None and not facts.world and facts.versions and facts.id not in taken
        )
        return sum(1.0 / math.floor(most - lag + 1) for lag in lags if lag <= most)

    async def _give_up(self, kind: str, why: str, taken: Container[Unit] = ()) -> None:
        """Hold back the turns that have waited too long to be learned from, except the units that a batch would take."""
        now, ledger, wait = self._clock(), self._reading.ledger, self._config.batch_wait_s
        waiting = [entry for entry in ledger.matured.values() if entry.facts.unit not in taken]
        late = batching.timed_out_turns(waiting, ledger.first_open, now=now, config=self._config)
        reason = f"{kind}: {why} in {wait:g} s (reward.batch_wait_s)"
        await self._hold({entry.facts.id: reason for entry in late}, now)

    def _unfit(self, entry: Matured, lineage: Lineage, steps: int) -> str | None:
        """Return why a turn with a known reward is not trained on; None if it may be."""
        facts = entry.facts
        if facts.id in self._reading.ledger.to_hold:
            return self._reading.ledger.to_hold[facts.id]
        lag = facts.lag(lineage, steps)
        if self._numerics is not None and facts.numerics != self._numerics:
            return f"numerics:{facts.numerics or 'unknown'}"
        if lag > (self._config.world_staleness if facts.world else self._config.max_staleness):
            return f"stale:{math.ceil(lag)}"  # whole steps: turns are counted by their reasons
        return "coverage" if entry.silent and self._reading.ledger.alarms.silenced(facts.tenant) else None

    async def _record(
        self,
        step: int,
        found: Sequence[tuple[Turn, Matured]],
        chosen: ChosenTurns,
        reference: PolicyVersion,
        base: PolicyVersion | None,
    ) -> TrainingBatch:
        """Compute the credit, and write the batch and the holdbacks of the turns that it passed over. Raises NoSignal, Conflict."""
        ledger = self._reading.ledger
        ledger.teaching.catch_up()
        turns, entries = [turn for turn, _ in found], [entry for _, entry in found]
        relative = batching.relative_weights(chosen.entries, chosen.weights, ledger.propensity)
        after = ledger.later_returns(entries)
        row = Batch(
            step=step,
            turns=tuple(turn.id for turn in turns),
            credits=(),
            reference=reference,
            at=self._clock(),
            base=base,
            even=True,
            weights=tuple(batch_weights(turns, relative, even=True)) if relative else (),
            after=batching.returns_after_cuts(entries, after),
            upto=self._reading.cursor,
            drawn=tuple(chosen.weights.get(turn.id, 1.0) for turn in turns),
        )
        try:
            batch = await self._credit.give(row, ledger, found, chosen.passed, after)
        except NoSignal as error:
            await self._hold(dict.fromkeys(row.turns, f"{NO_SIGNAL}: {error}"), row.at)
            raise
        passed = [
            Holdback(turn=entry.facts.id, reason=f"{PASSED_OVER}: step {step} drew others", at=batch.at)
            for entry in chosen.passed
        ]
        await self._log.append(*passed, batch)  # in one transaction, so that no turn passed over is drawn again
        await self._reading.catch_up()
        if ledger.last_batch != batch:
            raise Conflict(f"another process wrote batch {step}; only one trainer may use a log: stop the other")
        return await anext(self.recorded(step, step))

    async def _hold(self, reasons: Mapping[str, str], at: float) -> None:
        """Hold turns back, each for its reason."""
        await self._write([Holdback(turn=turn, reason=reason, at=at) for turn, reason in reasons.items()])

    async def _write(self, rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), CHUNK):
            await self._log.append(*rows[start : start + CHUNK])
        if rows:
            await self._reading.catch_up()


# ---------------------------------------------------------------- the trainer's source of batches


class DeskSource:
    """Waits for turns whose rewards are known, and makes batches of them.

    `base` is the release that the next step starts from, if not from the last step; the code that sends the trainer back sets it.

    Args:
        desk: makes samples of turns.
        live: looks up the release that the KL penalty is measured against, anew for each batch.
        size: least number of turns per batch; whole episodes may exceed it. There are fewer only if no more fit into `reward.batch_tokens`.
        poll_s: seconds between two reads of the log.
    """

    def __init__(
        self, desk: RewardDesk, live: Callable[[], Awaitable[PolicyVersion]], *, size: int, poll_s: float
    ) -> None:
        self._desk, self._live, self._size, self._poll_s = desk, live, size, poll_s
        self.base: PolicyVersion | None = None

    async def collect(self) -> Sequence[Turn]:
        """Wait until a batch of turns is ready."""
        while True:
            await self._desk.poll()
            if turns := await self._desk.turns(self._desk.last_step, self._size, self.base):
                return turns
            await asyncio.sleep(self._poll_s)

    async def look(self) -> int:
        """Write the rewards and outcomes that are due, for a trainer that may take no step now. Return the number of turns of a batch."""
        await self._desk.poll()
        return len(await self._desk.ready(self._desk.last_step, self._size, self.base))

    async def score(self, turns: Sequence[Turn]) -> TrainingBatch:
        """Make a batch of these turns, or of newer ones, with its credits, and record it before returning it. Raises NoSignal."""
        step = self._desk.last_step + 1
        made = await self._desk.batch(step, self._size, await self._live(), self.base)
        if made is None:
            raise NoSignal("some of the ready turns have been held back since; the rest wait for more turns")
        self.base = None
        return made
