"""`single`: the model is asked once."""

from __future__ import annotations

from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.attempt import Attempt
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.rollout import Ended, Model, Rollout
from ostinato.worlds.tasks.task import Task


class SingleAnswer:
    """Implements `Harness`: the task's messages, one answer, no tools. A sandbox is not touched."""

    name = "single"
    hash = harness_hash("single", version=1, decides={})

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        attempt = Attempt(task, self)

        async def once() -> Ended:
            answered = await attempt.ask(model)
            return Ended.LENGTH if answered.finish == "length" else Ended.SUBMITTED

        return await attempt.work(once, None)
