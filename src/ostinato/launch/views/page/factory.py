"""The page of a run, from its files to its routes, and an operator's actions on it, by the same functions as the command line."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import aiohttp

from ostinato.app.evaluation import open_releases
from ostinato.app.storage import Run, open_log
from ostinato.core.audit import Audit
from ostinato.core.clock import wall_clock
from ostinato.core.errors import Conflict, NotFound, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import Renderer
from ostinato.launch.placing.address import read_address
from ostinato.launch.views.page.run_facts import RunFacts
from ostinato.launch.views.page.worlds.facts import RunWorlds
from ostinato.record.rowlog import RowLog
from ostinato.release.controller import ReleaseController
from ostinato.release.monitors.watcher import accept
from ostinato.serve.gateway import Page
from ostinato.web.page.app import Pages
from ostinato.web.page.sources import PlaygroundAnswer
from ostinato.weights.version.content import version_ref

# ---------------------------------------------------------------- acts


_TIMEOUT = aiohttp.ClientTimeout(total=120)


class RunActs:
    """Acts on one run. Release actions run one at a time, so that of two people who act at once the second gets Conflict."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._moving = asyncio.Lock()

    async def ship(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """As `ostinato ship`."""
        async with self._moving:
            releases, seen = await self._releases(expected_live)
            event = await releases.ship(await self._kept(root), reason, actor=actor, expected=seen)
        return f"{event.policy} is live; it was {event.previous}"

    async def approve(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """As `ostinato approve`."""
        async with self._moving:
            releases, _ = await self._releases(expected_live)
            event = await releases.approve(await self._kept(root), reason, actor=actor)
        return f"{event.policy} is live; it was {event.previous}"

    async def refuse(self, root: str, expected_live: str, reason: str, actor: str) -> str:
        """As `ostinato refuse`."""
        async with self._moving:
            releases, _ = await self._releases(expected_live)
            event = await releases.refuse(await self._kept(root), reason, actor=actor)
        return f"{event.policy} never ships by itself; {event.previous} is still live"

    async def roll_back(self, expected_live: str, reason: str, actor: str) -> str:
        """As `ostinato rollback`."""
        async with self._moving:
            releases, seen = await self._releases(expected_live)
            event = await releases.rollback(None, reason, actor=actor, expected=seen)
        return f"{event.policy} is live again; it was {event.previous}"

    async def accept(self, alarm: str, id: str, reason: str, actor: str) -> str:
        """As `ostinato alarms accept`."""
        row = await accept(self._run.log, alarm, reason, actor, wall_clock(), id)
        return f"{row.name} ended; it is not raised again for a finding of this size"

    async def ask(self, messages: Sequence[Mapping[str, str]], arms: Sequence[str]) -> tuple[PlaygroundAnswer, ...]:
        """Ask through the gateway with the run's own key. These turns belong to nobody, and nothing is learned from them."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=self._headers()) as session:
            return tuple(await asyncio.gather(*(self._answer(session, messages, arm) for arm in arms)))

    async def rate(self, turn: str, name: str, correction: str) -> str:
        """Send a person's signal about a turn. Raises Unavailable."""
        event: dict[str, Any] = {
            "id": f"playground-{secrets.token_hex(12)}",
            "target": turn,
            "name": name,
            "value": True,
            "source": "human",
        }
        if correction:
            event["correction"] = correction
        async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=self._headers()) as session:
            found = await self._post(session, "/v1/feedback", event, {})
        return str(found.get("status", found))

    # ------------------------------------------------------------ inside

    async def _releases(self, expected_live: str) -> tuple[ReleaseController, PolicyVersion]:
        """A controller for release actions by hand, and the expected live version. Raises Conflict if another one is live."""
        releases = open_releases(self._run)
        live = (await releases.ledger.refresh()).live
        if live is None or live.hash != expected_live:
            raise Conflict(
                f"{_named(live)} is live now, which is not what the page showed: nothing was done; load the page again"
            )
        return releases, live

    async def _kept(self, root: str) -> PolicyVersion:
        policy = await self._run.follower.resolve(version_ref(root))
        if policy is None:
            raise NotFound(f"{root[:16]} is no longer in the weight store and cannot be shipped", field="root")
        return policy

    def _headers(self) -> dict[str, str]:
        return {"X-Ostinato-Key": self._run.home.admin_key()}

    async def _answer(
        self, session: aiohttp.ClientSession, messages: Sequence[Mapping[str, str]], arm: str
    ) -> PlaygroundAnswer:
        body = {
            "model": self._run.config.model.served_as,
            "messages": [dict(message) for message in messages],
            "user": "playground",
        }
        try:
            found = await self._post(session, "/v1/chat/completions", body, {"X-Ostinato-Slot": arm})
            said = cast("Mapping[str, Any]", found.get("ostinato") or {})
            spans = cast("Sequence[Sequence[Any]]", said.get("spans") or ())
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
        url = read_address(self._run.home.address)
        if url is None:
            raise Unavailable("the gateway has no address yet; try again in a moment")
        try:
            async with session.post(url + path, json=body, headers=headers) as reply:
                found = cast("Mapping[str, Any]", await reply.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"the gateway did not answer: {error!r}; try again") from error
        if reply.status >= 400:
            raise Unavailable(str(found.get("error", {}).get("message", found)))
        return found


def _named(policy: PolicyVersion | None) -> str:
    return "nothing" if policy is None else str(policy)


# ---------------------------------------------------------------- the page


class RunPage:
    """The page in the serving worker: its routes, the task that keeps its index up to date, and its closing."""

    def __init__(self, run: Run, log: RowLog, audit: Audit) -> None:
        self._run, self._log, self._audit = run, log, audit
        self._facts: RunFacts | None = None
        self._worlds: RunWorlds | None = None
        self._pages: Pages | None = None

    def routes(self, renderer: Renderer) -> Page:
        """The routes for a gateway with this renderer. Call it once."""
        self._facts = RunFacts(self._run, self._log, renderer.token_bytes)
        self._worlds = RunWorlds(
            self._run.home,
            self._run.config,
            self._log,
            renderer.token_bytes,
            readers=renderer.reader,
            shipped=self._facts.shipped,
        )
        self._pages = Pages(self._facts, self._worlds, RunActs(self._run), wall_clock, self._audit)
        return self._pages.routes

    async def keep(self, stopping: asyncio.Event) -> None:
        """Keep the index up to date with the log until cancelled. When `stopping` is set, end the viewers' streams and go on."""
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
        """Close the index and the threads."""
        if self._pages is not None:
            self._pages.end()
        if self._worlds is not None:
            self._worlds.close()
        if self._facts is not None:
            self._facts.close()


@contextlib.contextmanager
def open_page(run: Run, audit: Audit) -> Generator[RunPage]:
    """The page of a run, with a log connection of its own. `audit` receives what is done on it."""
    with open_log(run.config) as log:
        page = RunPage(run, log, audit)
        try:
            yield page
        finally:
            page.close()
