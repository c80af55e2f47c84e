"""The run's page in the gateway: its routes and the operator's actions. Also the same facts for the command line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ostinato.app.evaluation import open_releases
from ostinato.app.storage import Run, model_path, open_log
from ostinato.config import Config
from ostinato.core.audit import Audit
from ostinato.core.clock import wall_clock
from ostinato.core.errors import Conflict, NotFound, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import Renderer
from ostinato.record.rowlog import RowLog
from ostinato.record.sqlite import connect, driver, remove
from ostinato.release.controller import ReleaseController
from ostinato.release.monitors.watcher import accept
from ostinato.serve.gateway import Page
from ostinato.status.branches import BranchReader
from ostinato.status.gateway_address import read_address
from ostinato.status.run_facts import INDEX, RunFacts
from ostinato.status.worlds.run_worlds import RunWorlds
from ostinato.web.page.app import Pages
from ostinato.web.page.operator_actions import PlaygroundAnswer
from ostinato.weights.version.content import version_ref

if TYPE_CHECKING:  # a gateway imports it only once it serves
    import aiohttp

# ---------------------------------------------------------------- operator actions


_TIMEOUT_S = 120.0


class RunActions:
    """The operator's actions on one run, like the commands of the same names. Release actions run one at a time: of two people who act on
    the same live version, the second gets Conflict.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._moving = asyncio.Lock()

    async def ship(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        async with self._moving:
            releases, seen = await self._releases(expected_live)
            event = await releases.ship(await self._kept(root), reason, actor=actor, expected=seen)
        return f"{event.policy} is live; it was {event.previous}"

    async def approve(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        async with self._moving:
            releases, _ = await self._releases(expected_live)
            event = await releases.approve(await self._kept(root), reason, actor=actor)
        return f"{event.policy} is live; it was {event.previous}"

    async def refuse(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        async with self._moving:
            releases, _ = await self._releases(expected_live)
            event = await releases.refuse(await self._kept(root), reason, actor=actor)
        return f"{event.policy} never ships by itself; {event.previous} is still live"

    async def roll_back(self, expected_live: str, reason: str, actor: str) -> str:
        async with self._moving:
            releases, seen = await self._releases(expected_live)
            event = await releases.rollback(None, reason, actor=actor, expected=seen)
        return f"{event.policy} is live again; it was {event.previous}"

    async def accept(self, alarm: str, id: str, reason: str, actor: str) -> str:
        row = await accept(self._run.log, alarm, reason, actor, wall_clock(), id)
        return f"{row.name} ended; it is not raised again for a finding of this size"

    async def ask(self, messages: Sequence[Mapping[str, str]], arms: Sequence[str]) -> tuple[PlaygroundAnswer, ...]:
        """Ask each arm through the gateway with the run's own key. These turns belong to nobody and are not learned from."""
        async with self._session() as session:
            return tuple(await asyncio.gather(*(self._answer(session, messages, arm) for arm in arms)))

    async def rate(self, turn: str, name: str, correction: str) -> str:
        """Send a person's signal about a turn. Raises Unavailable."""
        event: dict[str, Any] = {"id": f"playground-{secrets.token_hex(12)}", "target": turn, "name": name}
        event |= {"value": True, "source": "human"} | ({"correction": correction} if correction else {})
        async with self._session() as session:
            answer = await self._post(session, "/v1/feedback", event, {})
        return str(answer.get("status", answer))

    # ------------------------------------------------------------ private

    async def _releases(self, expected_live: str) -> tuple[ReleaseController, PolicyVersion]:
        """Return a controller for manual release actions and the live version. Raises Conflict if that is not the expected one."""
        releases = open_releases(self._run)
        live = (await releases.ledger.refresh()).live
        if live is None or live.hash != expected_live:
            raise Conflict(
                f"{live or 'nothing'} is live now, which is not what the page showed: nothing was done; load the page again"
            )
        return releases, live

    async def _kept(self, root: str) -> PolicyVersion:
        policy = await self._run.follower.resolve(version_ref(root))
        if policy is None:
            raise NotFound(
                f"{root[:16]} is no longer in the weight store and cannot be shipped; ship a version that `ostinato weights log` lists",
                field="root",
            )
        return policy

    def _session(self) -> aiohttp.ClientSession:
        import aiohttp

        headers = {"X-Ostinato-Key": self._run.home.admin_key()}
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), headers=headers)

    async def _answer(
        self, session: aiohttp.ClientSession, messages: Sequence[Mapping[str, str]], arm: str
    ) -> PlaygroundAnswer:
        model, conversation = self._run.config.model.served_as, [dict(message) for message in messages]
        body = {"model": model, "messages": conversation, "user": "playground"}
        try:
            found = await self._post(session, "/v1/chat/completions", body, {"X-Ostinato-Slot": arm})
            details = cast("Mapping[str, Any]", found.get("ostinato") or {})
            spans = cast("Sequence[Sequence[Any]]", details.get("spans") or ())
            return PlaygroundAnswer(
                arm=arm,
                turn=f"{found['id']}:0",
                version=None if not spans else int(spans[0][0]),
                text=str(found["choices"][0]["message"]["content"] or ""),
            )
        except (Unavailable, KeyError, IndexError, TypeError, ValueError) as error:
            return PlaygroundAnswer(arm=arm, turn="", version=None, text="", error=str(error))

    async def _post(
        self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Mapping[str, Any]:
        import aiohttp

        url = read_address(self._run.home.address)
        if url is None:
            raise Unavailable("the gateway has no address yet; try again in a moment")
        try:
            async with session.post(url + path, json=body, headers=headers) as reply:
                answer = cast("Mapping[str, Any]", await reply.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"the gateway did not answer: {error!r}; try again") from error
        if reply.status >= 400:
            raise Unavailable(str(answer.get("error", {}).get("message", answer)))
        return answer


# ---------------------------------------------------------------- the page


class RunPage:
    """The page in the serving worker: its routes and the task that keeps its index up to date."""

    def __init__(self, run: Run, log: RowLog, audit: Audit, branches: BranchReader) -> None:
        self._run, self._log, self._audit, self._branches = run, log, audit, branches
        self._facts: RunFacts | None = None
        self._pages: Pages | None = None
        self._closing = contextlib.ExitStack()

    def routes(self, renderer: Renderer) -> Page:
        """Return the routes for a gateway with this renderer. Call it once."""
        run, log, pieces = self._run, self._log, renderer.token_bytes
        facts = self._facts = RunFacts(run, log, pieces, branches=self._branches)
        self._closing.callback(facts.close)
        worlds = RunWorlds(run.home, run.config, log, pieces, readers=renderer.reader, shipped=facts.shipped)
        self._closing.callback(worlds.close)
        self._pages = Pages(facts, worlds, RunActions(run), wall_clock, self._audit)
        self._closing.callback(self._pages.end)
        return self._pages.routes

    async def keep(self, stopping: asyncio.Event) -> None:
        """Keep the index up to date with the log until cancelled. When `stopping` is set, end the viewers' streams but go on."""
        assert self._facts is not None
        assert self._pages is not None
        keeping = asyncio.create_task(self._facts.feed.keep())
        try:
            ending = asyncio.create_task(stopping.wait())
            await asyncio.wait({keeping, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            self._pages.close()
            if keeping.done():
                keeping.result()
            await keeping
        finally:
            keeping.cancel()

    def close(self) -> None:
        self._closing.close()


@contextlib.contextmanager
def open_page(run: Run, audit: Audit, branches: BranchReader) -> Generator[RunPage]:
    """Open a run's page with its own log connection. `audit` receives the actions on it."""
    with open_log(run.config) as log, contextlib.closing(RunPage(run, log, audit, branches)) as page:
        yield page


# ---------------------------------------------------------------- facts for the command line


PATIENCE_S = 60.0
"""Timeout of one question that is asked from a terminal."""


@contextlib.asynccontextmanager
async def open_facts(run: Run, *, turns_s: float = math.inf) -> AsyncGenerator[RunFacts]:
    """Open a run's facts: all decisions, and as many turns, newest first, as can be read in `turns_s` seconds.

    Only the gateway may write the page's index, so the missing rows are read into a temporary copy.
    """
    with tempfile.TemporaryDirectory(prefix="ostinato-") as folder, open_log(run.config) as log:
        index = Path(folder) / INDEX
        copy_index(run.home.folds / INDEX, index)
        made = RunFacts(run, log, LazyTokenBytes(run.config), wall_clock, index=index, patience_s=PATIENCE_S)
        with contextlib.closing(made) as facts:
            await facts.feed.decided()
            until = time.monotonic() + turns_s
            while await facts.feed.step() and time.monotonic() < until:
                pass
            yield facts


def copy_index(index: Path, to: Path) -> None:
    """Copy a consistent snapshot of the index. A missing or unreadable one is not copied; it is then rebuilt from the log."""
    if not index.exists():
        return
    try:
        with (
            contextlib.closing(connect(index, write=False)) as source,
            contextlib.closing(driver.connect(to)) as target,
        ):
            source.backup(target)
    except driver.Error:
        remove(to)


class LazyTokenBytes:
    """Maps a token id to its bytes, with the tokenizer of the run's model, loaded on first use. Always b"" if it cannot be loaded."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __call__(self, token: int) -> bytes:
        return self._bytes(token)

    @functools.cached_property
    def _bytes(self) -> Callable[[int], bytes]:
        from ostinato.model.renderer import HFRenderer

        try:
            return HFRenderer(model_path(self._config)).token_bytes
        except OstinatoError:
            return lambda _: b""
