"""A ledger of operations that is filled from a log, row by row."""

from __future__ import annotations

from ostinato.compute.ledger import OperationLedger
from ostinato.compute.work import TokenWork
from ostinato.core.records import Arm, Batch, Turn
from ostinato.core.seams import Cursor, Log


class Filling:
    """A position in the log, and the ledger filled up to there.

    `kept`: for how many turns the lengths are remembered, for the batches that the turns go into; None: for all.

    Example::

        filling = Filling(work)
        await filling.catch_up(log)
        filling.ledger.of_all
    """

    def __init__(self, work: TokenWork, *, after: Cursor = 0, kept: int | None = None) -> None:
        self.ledger = OperationLedger()
        self._work, self._after, self._kept = work, after, kept
        self._lengths = dict[str, tuple[int, int, str | None]]()

    async def catch_up(self, log: Log) -> None:
        """Take in the rows added to the log since the last call."""
        async for cursor, row in log.read(self._after, {Turn, Batch}):
            self._after = cursor
            if isinstance(row, Turn):
                self._serve(row)
            elif isinstance(row, Batch):
                self._step(row)

    def _serve(self, row: Turn) -> None:
        if row.arm is Arm.OUTSIDE or row.redacted:
            return
        prompt, answer = len(row.prompt_ids), len(row.sampled_ids)
        before = self._lengths.get(row.parent or "")
        cached = 0 if before is None else min(prompt - 1, before[0] + before[1])
        self._lengths[row.id] = (prompt, answer, row.parent)
        if self._kept is not None and len(self._lengths) > self._kept:
            del self._lengths[next(iter(self._lengths))]
        evaluation = row.arm is Arm.EVAL
        self.ledger = self.ledger.served(self._work, prompt, max(0, cached), answer, evaluation=evaluation)

    def _step(self, row: Batch) -> None:
        inside, lengths = set(row.turns), self._lengths
        taken = [lengths[turn] for turn in row.turns if turn in lengths]
        self.ledger = self.ledger.stepped(
            self._work,
            [
                (
                    prompt,
                    min(prompt, sum(lengths[parent][:2])) if parent in inside and parent in lengths else 0,
                    answer,
                )
                for prompt, answer, parent in taken
            ],
        )
