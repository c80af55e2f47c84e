"""An engine that begins an answer and then stalls."""

import contextlib

from ostinato.core.records import PolicyVersion
from ostinato.testing.engine import FakeEngine

V0 = PolicyVersion(number=0, hash="fake0")


class Stalls(FakeEngine):
    """Yields `tokens` tokens of each answer at once, and then nothing for a minute. `tokens` can be changed while it runs."""

    def __init__(self, tokens, script="hello world", **more):
        made = script if callable(script) else lambda _: script
        super().__init__(made, slots={"live": V0, "world": V0}, **more)
        self.tokens = tokens

    async def generate(self, request):
        said = 0
        self.delay_s = 0.0 if self.tokens else 60.0
        async with contextlib.aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                said += 1
                if said >= self.tokens * request.n:
                    self.delay_s = 60.0
