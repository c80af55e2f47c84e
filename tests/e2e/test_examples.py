"""The examples of the client and of the guide, run as they are written: only the address is another one."""

import asyncio
import inspect
import re
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.records import Pending
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato_client import AsyncOstinato, Ostinato

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8321"


def blocks(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@asynccontextmanager
async def served():
    """A server and its log, and a function that runs an example's text against it."""
    log = MemoryLog()
    app = create_app(
        engine=FakeEngine(lambda request: "def hello(): ..."),
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(),
        clock=wall_clock,
        model_name="m",
    )
    async with serving(app) as url:

        async def run(text: str, **names) -> dict:
            assert ADDRESS in text
            await asyncio.to_thread(exec, text.replace(ADDRESS, url), names)
            return names

        yield url, log, run


def test_the_address_is_the_one_that_a_server_takes_by_default():
    listen = load(None, []).listen
    assert f"http://{listen.host}:{listen.port}" == ADDRESS


async def test_the_clients_readme():
    (example,) = blocks("client/README.md")
    async with served() as (_, log, run):
        names = await run(example)
        assert await asyncio.to_thread(names["signals"].flush)
        await asyncio.to_thread(names["signals"].close)
    assert [(signal.turn, signal.name) for signal in log.signals()] == [
        ("chatcmpl-3f:0", "accepted"),
        ("chatcmpl-3f:0", "followed_up"),
    ]


@pytest.mark.parametrize("client", [Ostinato, AsyncOstinato])
async def test_the_clients_docstrings(client):
    example = textwrap.dedent(inspect.getdoc(client).partition("Example::\n")[2])
    completion = SimpleNamespace(id="chatcmpl-3f")
    async with served() as (url, log, run):
        if client is Ostinato:
            await run(example, Ostinato=Ostinato, completion=completion)
        else:
            names = {"AsyncOstinato": AsyncOstinato, "completion": completion}
            body = textwrap.indent(example.strip().replace(ADDRESS, url), "    ")
            exec(f"async def example():\n{body}", names)
            await names["example"]()
    assert [(signal.turn, signal.name) for signal in log.signals()] == [("chatcmpl-3f:0", "accepted")]


@pytest.mark.parametrize(("said", "value"), [((), 0.0), (("still_there",), 1.0), (("still_there", "undone"), -1.0)])
def test_the_guides_reward_function(said, value):
    (example,) = [block for block in blocks("docs/guide/rewards.md") if "def kept" in block]
    names: dict = {}
    exec(example, names)
    turn = a_turn(ended_at=10.0)
    signals = [a_signal(turn, name, id=name) for name in said]
    assert names["kept"](turn, signals, 100.0, window=90.0).value == value
    assert names["kept"](turn, signals, 99.0, window=90.0) == Pending(until=100.0)
