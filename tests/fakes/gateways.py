"""A real gateway in front of a fake engine, as the rollout worker sees it."""

from contextlib import asynccontextmanager

from pydantic import SecretStr
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.errors import Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato.worlds.harness.gateway import EpisodeModel, WorldGateway

KEY = "admin-0123456789abcdef"


@asynccontextmanager
async def world_gateway(script="hello", *, context=4096, engine=None):
    """A gateway whose world slot answers `script` (a text, or a function of the request), and its log."""
    policy = PolicyVersion(number=0, hash="fake0")
    engine = engine or FakeEngine(
        script if callable(script) else lambda request: script, slots={"live": policy, "world": policy}, context=context
    )
    log = MemoryLog()
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(context=context),
        log=log,
        config=ServeConfig(),
        clock=lambda: 1000.0,
        model_name="m",
        admin_keys=[SecretStr(KEY)],
    )
    async with serving(app) as url, WorldGateway(url, KEY, timeout_s=WHOLE_PROGRAM_S) as gateway:
        yield gateway, log


class _Losing:
    def __init__(self, gateway, count):
        self.gateway, self.left, self.temperature = gateway, count, gateway.temperature

    async def named(self):
        return await self.gateway.named()

    async def call(self, method, path, body=None, headers=None):
        answer = await self.gateway.call(method, path, body, headers)
        if self.left:
            self.left -= 1
            raise Unavailable("lost on its way")
        return answer


def lost_answers(gateway, count):
    """An episode's model whose first `count` answers are lost after the gateway has made them."""
    return EpisodeModel(_Losing(gateway, count), "e", "g", "h", pause_s=0.001)
