"""The attacks of the siege, some rounds of each and all at once, against a gateway in this process: every outcome is a right one."""

import asyncio
import contextlib

from tests.deadlines import WHOLE_PROGRAM_S
from tests.examinations.siege import attacks
from tests.examinations.siege.attacker import Tally, besiege
from tests.examinations.siege.crew import not_right
from tests.examinations.siege.wire import Target
from tests.fakes.page_world import A_TURN, ACME, BOLT, PageWorld

from ostinato.launch.placing.address import bind
from ostinato.launch.workers.http_server import listen
from ostinato.serve.config import QuotaConfig, ServeConfig
from ostinato.serve.wire import protocol
from ostinato.serve.wire.connections import Connections
from ostinato.web.page import query_params

SOON_S = 2.0
WIDE = QuotaConfig(
    bytes_per_s=1e12, open_samples=64, max_n=64
)  # for as many rounds as it takes: the world's clock stands still


@contextlib.asynccontextmanager
async def gateway():
    """The attackers' view of a gateway that gives up on whoever is silent for two seconds."""
    keys = (f"acme:{ACME}", f"bolt:{BOLT}")
    world = PageWorld(ServeConfig(api_keys=keys, quota=WIDE, body_timeout_s=SOON_S, send_timeout_s=SOON_S))
    stopping, urls = asyncio.Event(), []
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(
            listen(world.app, listener, stopping, urls.append, connections=Connections(per_address=4), unread_s=SOON_S)
        )
        host, port = listener.getsockname()
        yield Target(host=host, port=port, key=ACME, turn=A_TURN.id)
        world.pages.close()
        stopping.set()
        await serving
    world.pages.end()


async def test_every_attack_is_answered_rightly(monkeypatch):
    for place, name in ((protocol, "HEAD_S"), (query_params, "FORM_S"), (attacks, "HOLD_S")):
        monkeypatch.setattr(place, name, SOON_S)
    monkeypatch.setattr(attacks, "UNPACKED", 4 << 20)
    monkeypatch.setattr(attacks, "MODEL", "m")
    tally = Tally()
    async with asyncio.timeout(WHOLE_PROGRAM_S), gateway() as target:
        attacking = asyncio.create_task(besiege(attacks.ATTACKS, target, tally, most_lanes=3))
        while not attacking.done() and not_right(tally.outcomes) and not tally.wrong:
            await asyncio.sleep(0.05)
        attacking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attacking
    assert not tally.wrong
    assert not not_right(tally.outcomes)
