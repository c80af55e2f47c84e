"""The simplest harness: the model is asked once."""

from __future__ import annotations

import asyncio

from ostinato.core.errors import BadRequest
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.rollout import OVERRAN, Ended, Model, Rollout, timed_out
from ostinato.worlds.tasks.task import Task

_VERSION = 1


class SingleAnswer:
    """Implements `Harness`: the task's messages, one answer, no tools and no sandbox."""

    name = "single"
    hash = harness_hash(name, _VERSION)

    def spec(self, task: Task) -> None:
        """None: it runs nothing."""

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """One answer, or as much of it as there is when the task's time is over. If the prompt does not fit, the rollout fails before the
        model has said anything. Raises Unavailable, or OutOfTime if the time ran out before the model said anything.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            answered = await model.ask(task.messages, max_tokens=task.tokens, stop=task.stop, left_s=task.timeout_s)
        except BadRequest as error:
            return Rollout(
                task=task.id,
                harness=f"{self.name}@{self.hash}",
                ended=Ended.FAILED,
                messages=task.messages,
                turns=(),
                detail={"why": str(error)},
            )
        overran = answered.finish == OVERRAN
        return Rollout(
            task=task.id,
            harness=f"{self.name}@{self.hash}",
            ended=Ended.TIMEOUT if overran else Ended.LENGTH if answered.finish == "length" else Ended.SUBMITTED,
            messages=(*task.messages, answered.message),
            turns=(answered.turn,),
            effort={
                "turns": 1.0,
                "tokens": float(answered.tokens),
                "final_tokens": float(answered.tokens),
                "seconds": clock() - start,
            },
            detail={"why": timed_out(task)} if overran else {},
        )
