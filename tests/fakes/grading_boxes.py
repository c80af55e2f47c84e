"""The sandboxes that graders use, for tests: real boxes, and single runs beside them."""

from ostinato.worlds.sandbox import Boxes, SandboxConfig, SingleRuns, python_inside

PYTHON = python_inside()


class GradingBoxes(Boxes):
    def __init__(self):
        super().__init__(SandboxConfig())
        self.runs = SingleRuns(SandboxConfig())

    async def close(self):
        self.runs.close()
        await super().close()
