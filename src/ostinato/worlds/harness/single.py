"""The plainest harness: the model is asked once."""

from __future__ import annotations

from ostinato.core.errors import BadRequest
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.rollout import Ended, Model, Rollout
from ostinato.worlds.tasks.task import Task

_VERSION = 1


class SingleAnswer:
    """Implements `Harness`: the task's messages, one answer, no tools and no sandbox."""

    name = "single"
    hash = harness_hash(name, _VERSION)

    def spec(self, task: Task) -> None:
        """None: it runs nothing."""

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """One answer. A prompt that does not fit ends it before the model said anything."""
        try:
            answered = await model.ask(task.messages, max_tokens=task.tokens, stop=task.stop)
        except BadRequest as error:
            return Rollout(
                task=task.id,
                harness=f"{self.name}@{self.hash}",
                ended=Ended.FAILED,
                messages=task.messages,
                turns=(),
                detail={"why": str(error)},
            )
        return Rollout(
            task=task.id,
            harness=f"{self.name}@{self.hash}",
            ended=Ended.LENGTH if answered.finish == "length" else Ended.SUBMITTED,
            messages=(*task.messages, answered.message),
            turns=(answered.turn,),
            effort={"turns": 1.0, "tokens": float(answered.tokens), "final_tokens": float(answered.tokens)},
        )
