"""The trainer's publications: stores each step's weights as a version, and offers a version for release every few steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Learned
from ostinato.weights.publish.publisher import Published, VersionPublisher


class Candidates:
    """The loop's `Publisher` over the weight store: stores each version, and moves the ref `candidate` every few steps.

    Args:
        publisher: stores versions.
        run: the name under which they are published.
        every: steps between two candidates.
        on_published: called with each version that is stored.
        numerics: the id of the trainer's contract.
        newest: a ref that is moved to each version as soon as it is stored, for rollouts; None: no such ref.
    """

    def __init__(
        self,
        publisher: VersionPublisher,
        run: str,
        every: int,
        on_published: Callable[[Published], None],
        *,
        numerics: str = "",
        newest: str | None = None,
    ) -> None:
        self._publisher, self._run, self._every, self._on_published = publisher, run, every, on_published
        self._numerics, self._newest = numerics, newest
        self._naming = True
        self._due: PolicyVersion | None = None  # the newest version that is or should be the candidate
        self.last: PolicyVersion | None = None

    @contextlib.asynccontextmanager
    async def repeating(self, named: PolicyVersion | None) -> AsyncGenerator[None]:
        """Repeat steps inside the block: `named` stays the candidate unless a newer one is due at the end.

        If each were named again, the gate would judge, and ship, versions that are older than the live one.
        """
        self._naming = False
        try:
            yield
        finally:
            self._naming = True
        await self._follow()
        if self._due is not None and (named is None or self._due.number > named.number):
            await self._publisher.name(self._due, "candidate")

    async def publish(self, learned: Learned) -> PolicyVersion:
        """Store the version under its root. Idempotent."""
        due = learned.step % self._every == 0
        done = await self._publisher.publish(
            learned.policy_number,
            learned.weights,
            run=self._run,
            base=self.last,
            meta={"step": learned.step},
            numerics=self._numerics,
            ref="candidate" if due and self._naming else None,
        )
        self.last = done.policy
        self._due = done.policy if due else self._due
        await self._follow()
        self._on_published(done)
        return done.policy

    async def known(self, learned: Learned) -> PolicyVersion | None:
        """The stored version with exactly these weights, or None."""
        return await self._publisher.known(learned.policy_number, learned.weights)

    async def close(self) -> None:
        """Close the publisher."""
        await self._publisher.close()

    async def _follow(self) -> None:
        """Move the ref for rollouts to the last version, but never back while steps are repeated."""
        if self._newest is not None and self._naming and self.last is not None:
            await self._publisher.name(self.last, self._newest)

    async def offer(self) -> None:
        """Make the version that was stored last, if any, the candidate, whether or not a candidate is due."""
        if self.last is not None:
            await self._publisher.name(self.last, "candidate")


class Overlapped:
    """Publishes in the background: one version is stored while the trainer computes the next step.

    Cancelling a caller that waits does not cancel the publication. Call `settle` again before the end, or the last step may be lost.
    """

    def __init__(self, inner: Candidates) -> None:
        self._inner = inner
        self._under_way: asyncio.Task[PolicyVersion] | None = None

    @property
    def trouble(self) -> str | None:
        """Why the last publication failed, until `begin` or `settle` raises it; None if it succeeded or is under way."""
        task = self._under_way
        error = task.exception() if task is not None and task.done() and not task.cancelled() else None
        return None if error is None else f"the last version is not stored: {type(error).__name__}: {error}"

    async def begin(self, learned: Learned) -> None:
        """Start storing the version, which waits for the previous one. Raises the previous one's error, after starting this one."""
        before = self._under_way
        self._under_way = asyncio.create_task(self._publish(learned, before))
        if before is not None:
            await asyncio.wait({before})
            before.result()

    async def settle(self) -> None:
        """Wait until everything that was begun is stored. Raises the error of the last publication."""
        if (task := self._under_way) is not None:
            await asyncio.wait({task})
            self._under_way = None
            task.result()

    async def _publish(self, learned: Learned, before: asyncio.Task[PolicyVersion] | None) -> PolicyVersion:
        if before is not None:
            await asyncio.wait({before})
        return await self._inner.publish(learned)
