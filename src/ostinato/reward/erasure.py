"""Recompute the log's batches without some people: the credits that a desk would have given over a log without these people's rows.

Leaving a person's turns out of a batch is not enough. The credits of the others were computed with a baseline that was trained on the
person's rewards, normalised by an RMS that includes their advantages, and scaled by shares that include their turns. So the ledger is
folded again from the remaining rows, and each batch gets new credits at its place in the log.

Two more values are recomputed: response propensity weights, from the remaining turns, and rewards that were predicted from early
signals (`reward.surrogate`), without the person's late rewards.

What stays as it happened: which turns each step took, and the probabilities with which they were drawn (`Batch.drawn`). A desk that never
saw the person would have made other batches, and sampled other turns. Batches of versions that recorded only final weights keep their
ratios.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ostinato.core.errors import Corrupt, NoSignal, NotFound
from ostinato.core.notices import Forgotten
from ostinato.core.records import (
    Batch,
    Consent,
    ConsentGiven,
    Delivered,
    Holdback,
    Quarantine,
    Reward,
    Row,
    Signal,
    Turn,
)
from ostinato.core.samples import TrainingBatch
from ostinato.core.seams import Cursor, Log
from ostinato.reward.batching import relative_weights, returns_after_cuts
from ostinato.reward.config import RewardConfig
from ostinato.reward.demonstrations import AnswerIds
from ostinato.reward.hints import HintSource, HintTokens
from ostinato.reward.ledger import KINDS, PASSED_OVER, TurnLedger, kind_of
from ostinato.reward.ledger_entries import Gold, Matured, Taught, no_gold
from ostinato.reward.line_credit import TokenBytes
from ostinato.reward.pipeline import BatchCredit, batch_weights, with_samples

Erased = Callable[[Cursor, Turn], bool]
"""(place in the log, turn) -> True if the turn is erased."""


def erased_people(people: Mapping[tuple[str, str | None], Cursor], *, others: bool = True) -> Erased:
    """Return a predicate for the turns of these people, each up to a place in the log, and, with `others`, all turns already redacted.

    A person is a tenant and a user; None stands for all users of a tenant. Already redacted turns count only if their consent allowed
    training, since the others never reached the weights.

    Example: ``erased_people({("acme", "ann"): log.newest()})``
    """

    def erased(place: Cursor, turn: Turn) -> bool:
        upto = max(people.get((turn.tenant, turn.user), 0), people.get((turn.tenant, None), 0))
        return (others and turn.redacted and turn.consent is Consent.YES) or place <= upto

    return erased


@dataclass(frozen=True, slots=True, kw_only=True)
class RefoldedBatch:
    """A batch as recorded, and as it is without the erased people.

    `refused`: why nothing can be learned from it any more, so that its step is only counted; "" if something can.

    Example: ``RefoldedBatch(recorded=row, row=replace(row, turns=row.turns[1:], credits=credits), refused="")``
    """

    recorded: Batch
    row: Batch
    refused: str

    @property
    def changed(self) -> bool:
        """True if a trainer would learn something else from it than from the recorded batch."""
        return self.row != self.recorded or (bool(self.refused) and bool(self.recorded.turns))


class CreditRefold:
    """Reads a log once, and yields its batches without the erased turns.

    The other arguments are the desk's (`RewardDesk`). `erased_turns`: the ids of the erased turns, set once `batches` has started.

    Example::

        refold = CreditRefold(log, config, taught, erased_people({("acme", "ann"): log.newest()}))
        async for batch in refold.batches():
            batch.row.turns, batch.row.credits
    """

    def __init__(
        self,
        log: Log,
        config: RewardConfig,
        taught: Taught,
        erased: Erased,
        *,
        gold: Gold = no_gold,
        token_bytes: TokenBytes | None = None,
        answer_ids: AnswerIds | None = None,
        hint_tokens: HintTokens | None = None,
    ) -> None:
        self._log, self._erased = log, erased
        hints = None if hint_tokens is None else HintSource(log, config, hint_tokens)
        self._credit = BatchCredit(log, taught, token_bytes, answer_ids, hints)
        self._ledger = TurnLedger(config, gold=gold, arms=taught.arms)
        # holdbacks of turns that the next batch passed over, written in one transaction with it
        self._passed: list[tuple[Cursor, Holdback]] = []
        self._last_consent_row: Cursor = 0  # the place of the last row that forgot a person or changed a consent
        self.erased_turns: frozenset[str] = frozenset()

    async def batches(self) -> AsyncIterator[RefoldedBatch]:
        """Yield every recorded batch, oldest first.

        Raises NotFound if retention has dropped rows. Raises Corrupt if a batch before the first erased turn gets other credits
        than those recorded, or a reward another prediction: then the settings, or the version, differ from those that it was made under.
        """
        if horizon := await self._log.horizon():
            raise NotFound(
                f"rows up to {horizon} were dropped (record.retain_days), so credits cannot be folded anew from the first turn on: train "
                "again from the base, or without retention from now on",
                field="record.retain_days",
            )
        first = await self._find_erased()
        async for place, row in self._log.read(0, set(KINDS)):
            left = self._without_erased(row)
            if left is None:
                continue
            if isinstance(left, Reward) and left.early and left.turn in self._ledger.open:
                left = self._predicted(left, recorded=place < first)
            elif isinstance(left, ConsentGiven | Forgotten):
                self._last_consent_row = place
            if isinstance(left, Batch) and isinstance(row, Batch):
                found = await self._recredit(row, left)
                for at, held in self._passed:  # after the credit, as the desk reads them
                    self._ledger.apply(at, held)
                self._passed = []
                if place < first and found.changed:
                    raise Corrupt(
                        f"batch {row.step} was made under other settings (reward.*, learn.*) or by another version than now: credits "
                        "cannot be folded anew; use those that the run had"
                    )
                yield found
                left = found.row
            elif isinstance(left, Holdback) and kind_of(left.reason) == PASSED_OVER:
                self._passed.append((place, left))
                continue
            self._ledger.apply(place, left)

    def _predicted(self, reward: Reward, *, recorded: bool) -> Reward:
        """Predict a predicted reward again. `recorded`: the prediction must match, and the recorded one is returned. Raises Corrupt."""
        tenant, most = self._ledger.open[reward.turn].facts.tenant, self._ledger.config.max_abs
        again = self._ledger.surrogate.predicted(tenant, reward, dict(reward.early), most)
        if not recorded:
            return again
        unseen = reward.upto < self._last_consent_row  # the desk may not have read the latest erasure or consent yet
        if not unseen and not math.isclose(again.value, reward.value, rel_tol=1e-6, abs_tol=1e-6):
            raise Corrupt(
                f"the reward of turn {reward.turn} was predicted under other settings (reward.surrogate.*) or by another version than now: "
                "it cannot be predicted anew; use those that the run had"
            )
        return reward

    async def _find_erased(self) -> Cursor:
        """Find the turns to erase. Returns the place of the first row about one, or a place beyond the end of the log if there is none."""
        found, first = set[str](), None
        async for place, row in self._log.read(0, {Turn}):
            if isinstance(row, Turn) and self._erased(place, row):
                found.add(row.id)
                first = place if first is None else first
        self.erased_turns = frozenset(found)
        return 1 << 62 if first is None else first

    def _without_erased(self, row: Row) -> Row | None:
        """Return a row without the erased turns; None if it is only about these."""
        gone = self.erased_turns
        match row:
            case Turn():
                return None if row.id in gone else row
            case Signal() | Reward() | Quarantine() | Holdback():
                return None if row.turn in gone else row
            case Delivered() if not gone.isdisjoint(row.turns):
                left = tuple(turn for turn in row.turns if turn not in gone)
                return replace(row, turns=left) if left else None
            case Batch() if not gone.isdisjoint(row.turns):
                kept = [index for index, turn in enumerate(row.turns) if turn not in gone]
                return replace(
                    row,
                    turns=tuple(row.turns[index] for index in kept),
                    credits=tuple(row.credits[index] for index in kept),
                    weights=tuple(row.weights[index] for index in kept if row.weights),
                    shown=tuple(row.shown[index] for index in kept if row.shown),
                    after=tuple(row.after[index] for index in kept if row.after),
                    scales=tuple(row.scales[index] for index in kept if row.scales),
                    drawn=tuple(row.drawn[index] for index in kept if row.drawn),
                    hints=tuple(each for each in row.hints if not {each.turn, each.following} & gone),
                )
            case _:
                return row

    async def _recredit(self, recorded: Batch, left: Batch) -> RefoldedBatch:
        """Recompute the credits of a batch, of which `left` remains, at this place in the log."""
        ledger = self._ledger
        ledger.teaching.catch_up()
        if not left.turns:
            return RefoldedBatch(recorded=recorded, row=left, refused="no turn is left")
        found = await self._found(left)
        turns, entries = [turn for turn, _ in found], [entry for _, entry in found]
        after = ledger.later_returns(entries, left.upto or None)
        weights = self._weights(recorded, left, turns, entries)
        row = replace(left, weights=weights, after=returns_after_cuts(entries, after))
        passed = self._passed_over(left)
        try:
            row = await self._credit.give(row, ledger, found, passed, after, like=recorded)
        except NoSignal as error:
            return RefoldedBatch(recorded=recorded, row=row, refused=str(error))
        return RefoldedBatch(recorded=recorded, row=row, refused="")

    def _weights(
        self, recorded: Batch, left: Batch, turns: Sequence[Turn], entries: Sequence[Matured]
    ) -> tuple[float, ...]:
        """Recompute `Batch.weights` of what remains of a batch, at this place in the log."""
        if left.drawn:
            drawn = dict(zip(left.turns, left.drawn, strict=True))
            relative = relative_weights(entries, drawn, self._ledger.propensity)
        elif len(left.turns) < len(recorded.turns):  # written by an earlier version
            relative = dict(zip(left.turns, left.weights, strict=bool(left.weights)))
        else:
            return left.weights
        return tuple(batch_weights(turns, relative, even=left.even)) if relative else ()

    async def _found(self, left: Batch) -> Sequence[tuple[Turn, Matured]]:
        """Return the turns of a batch with their rewards. Raises Corrupt."""
        turns = await self._log.find(Turn, [(turn,) for turn in left.turns])
        rewarded = self._rewarded
        found = [(turn, entry) for turn in turns if (entry := rewarded.get(turn.id)) is not None]
        if len(found) < len(left.turns):
            raise Corrupt(f"batch {left.step} names a turn that the log does not hold with a reward; restore the log")
        return found

    def _passed_over(self, left: Batch) -> Sequence[Matured]:
        """Return the turns that the batch's step passed over, with their rewards. Raises Corrupt."""
        rewarded = self._rewarded
        for _, held in self._passed:
            if held.turn not in rewarded:
                raise Corrupt(
                    f"step {left.step} passed over turn {held.turn}, which the log does not hold with a reward; restore the log"
                )
        return [rewarded[held.turn] for _, held in self._passed]

    @property
    def _rewarded(self) -> Mapping[str, Matured]:
        """The turns with a reward and no outcome, by id, including those that current settings exclude from training."""
        return self._ledger.matured | self._ledger.doubted

    async def samples(self, batch: RefoldedBatch) -> TrainingBatch:
        """Return the samples that a trainer learns from; none if the batch is refused."""
        if batch.refused:
            return TrainingBatch(row=batch.row, samples=())
        return await with_samples(self._log, batch.row, self._credit.answer_ids, self._credit.hints)
