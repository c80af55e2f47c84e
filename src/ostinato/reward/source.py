"""People's turns as the loop sees them: `TurnSource` and `Rewards` over one reward desk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ostinato.core.errors import NoSignal
from ostinato.core.records import PolicyVersion, Turn
from ostinato.core.samples import TrainingBatch
from ostinato.reward.pipeline import RewardDesk


class DeskSource:
    """Waits for turns whose rewards are known, and makes batches of them.

    `base` is the release that the next step starts from, if not from the last one; it is set by the code that sends the trainer back.

    Args:
        desk: where turns become samples.
        live: the release that the KL penalty is measured against, looked up anew for each batch.
        size: turns per batch, at least, since whole episodes are taken; fewer only where no more fit into `reward.batch_tokens`.
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
        """For a trainer that may take no step now: write the rewards and outcomes that are due. Returns a batch's number of turns."""
        await self._desk.poll()
        return len(await self._desk.ready(self._desk.last_step, self._size, self.base))

    async def score(self, turns: Sequence[Turn]) -> TrainingBatch:
        """A batch of these turns, or of newer ones, with its credits, in the log before it is returned. Raises NoSignal."""
        step = self._desk.last_step + 1
        made = await self._desk.batch(step, self._size, await self._live(), self.base)
        if made is None:
            raise NoSignal("of the turns that were ready some have been held back since; the rest wait for others")
        self.base = None
        return made
