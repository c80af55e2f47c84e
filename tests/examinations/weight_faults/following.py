"""A follower in a process of its own, which reports its deliveries, its refusals, and each look at the ref."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.examinations.weight_faults.outcome import must
from tests.examinations.weight_faults.process import Child, Ears, Say, Work
from tests.examinations.weight_faults.versions import policy
from tests.fakes.faults import FaultyStore

from ostinato.core.weights import Snapshot
from ostinato.weights.follow.follower import Follower
from ostinato.weights.follow.journal import Journal
from ostinato.weights.version.content import weights_root

INTERVAL_S = 0.004


class Looks(FaultyStore):
    """A weight store that reports each read of ref live. The second look ends the first round."""

    say: Say | None = None

    async def read_ref(self, ref: str) -> str | None:
        if ref == "live" and self.say is not None:
            self.say(look=True)
        return await super().read_ref(ref)


def watching(follower: Follower, looks: Looks, journal: Journal | None = None) -> Work:
    """Work for a Child: follow live until killed."""

    async def work(say: Say, ears: Ears) -> None:
        looks.say = say

        async def changed(ref: str, snapshot: Snapshot) -> None:
            say(number=snapshot.policy.number, hash=snapshot.policy.hash, root=weights_root(snapshot.weights))

        await follower.watch(["live"], changed, INTERVAL_S, lambda ref, error: say(error=f"ref {ref}: {error}"))

    return work


@dataclass(slots=True)
class Seen:
    """The reports of a follower's process: the version numbers it delivered, verified, and its refusals."""

    delivered: list[int] = field(default_factory=list[int])
    errors: list[str] = field(default_factory=list[str])

    def rounds(self, child: Child, looks: int) -> None:
        """Listen until the child has looked `looks` times."""
        while looks:
            looks -= self._hear(child)

    def until(self, child: Child, number: int) -> None:
        """Listen until version `number` is the last one delivered."""
        while not self.delivered or self.delivered[-1] != number:
            self._hear(child)

    def _hear(self, child: Child) -> bool:
        said = child.hear()
        must(said is not None, f"the follower ended (status {child.wait() if said is None else 0})")
        assert said is not None
        if "error" in said:
            self.errors.append(said["error"])
        elif "hash" in said:
            must(said["hash"] == said["root"], f"delivered bytes of root {said['root']} as {said['hash']}")
            must(policy(said["number"]).hash == said["hash"], f"delivered {said['hash']} as version {said['number']}")
            self.delivered.append(said["number"])
        return "look" in said
