"""How many may look at once, and who: places of open event streams, and of questions to the run."""

import asyncio
from contextlib import suppress

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.page_world import ACME, ADMIN, BOLT, page_world

from ostinato.core.errors import Unavailable
from ostinato.core.visitors import Visitor
from ostinato.web.page import app

KEYS = (f"acme:{ACME}", f"bolt:{BOLT}", *(f"t{each}:sk-tenant{each}-0123456789" for each in range(4)))
ACMES, OPERATOR = Visitor(tenant="acme", operator=False), Visitor(tenant=None, operator=True)


class Browser:
    """Asks the app itself for events, so that a test says when the client reads and when it is gone."""

    def __init__(self, app, key, page="turns"):
        self.app, self.status, self.bodies = app, None, 0
        self.gone, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "GET",
            "scheme": "http",
            "path": "/events",
            "raw_path": b"/events",
            "query_string": f"page={page}".encode(),
            "headers": [(b"host", b"127.0.0.1"), (b"x-ostinato-key", key.encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "http_version": "1.1",
        }
        self.task = asyncio.create_task(self.app(self.scope, self.receive, self.send))

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.bodies += 1

    async def leave(self):
        self.gone.set()
        await self.task


async def answered(*browsers):
    async with asyncio.timeout(PATIENT_S):
        while any(each.status is None for each in browsers):
            await asyncio.sleep(0)
    return [each.status for each in browsers]


def places(world):
    return world.pages._live._open.total()


async def test_of_streams_that_are_asked_for_together_no_more_begin_than_there_are_places():
    async with page_world(api_keys=KEYS) as w:
        browsers = [Browser(w.app, ACME) for _ in range(40)]
        assert (await answered(*browsers)).count(200) == app.MOST_PER_TENANT
        assert places(w) == app.MOST_PER_TENANT
        others = [Browser(w.app, key.partition(":")[2]) for key in KEYS[1:] for _ in range(20)]
        everybody = app.MOST_VIEWERS - app.RESERVED_FOR_OPERATOR
        assert (await answered(*others)).count(200) == everybody - app.MOST_PER_TENANT
        operators = [Browser(w.app, ADMIN, "now") for _ in range(20)]
        assert (await answered(*operators)).count(200) == app.RESERVED_FOR_OPERATOR, "that no tenant could take"
        for each in [*browsers, *others, *operators]:
            await each.leave()
        assert places(w) == 0
        again = Browser(w.app, ACME)
        assert await answered(again) == [200]
        await again.leave()


async def test_the_operator_leaves_places_that_tenants_take_and_no_more_than_all_are_taken():
    stream = app.Live(lambda: 7.0)
    held = [stream.take(OPERATOR) for _ in range(app.MOST_VIEWERS - 1)]
    held.append(stream.take(ACMES))
    for visitor in (ACMES, OPERATOR):
        with pytest.raises(Unavailable, match="Too many pages"):
            stream.take(visitor)
    held[0].give_back()
    held[0].give_back()
    held[0] = stream.take(ACMES)
    with pytest.raises(Unavailable):
        stream.take(OPERATOR)


@pytest.mark.parametrize(
    "how", ["gone before the first byte", "cancelled before the first byte", "cancelled", "broken"]
)
async def test_a_place_is_given_back_however_a_stream_ends(how, monkeypatch):
    async with page_world(api_keys=KEYS) as w:
        browser = Browser(w.app, ACME)
        if "before" in how:
            browser.reads.clear()
        if how == "broken":
            monkeypatch.setattr(w.pages._live, "_clock", lambda: "no number")
        async with asyncio.timeout(PATIENT_S):
            while not places(w) and not browser.task.done():
                await asyncio.sleep(0)
            if how == "cancelled":
                while not browser.bodies:
                    await asyncio.sleep(0)
            browser.gone.set() if how.startswith("gone") else None
            browser.task.cancel() if how.startswith("cancelled") else None
            with suppress(asyncio.CancelledError, BaseExceptionGroup, ValueError):
                await browser.task
        assert (browser.bodies > 0) == (how in ("cancelled", "broken"))
        assert places(w) == 0


async def test_a_stream_ends_with_its_cookie():
    stream = app.Live(lambda: 7.0)

    async def parts():
        return {"part": "x"}

    assert [each async for each in stream.events(parts, lambda: False)] == []


# ---------------------------------------------------------------- questions


class Asked:
    """The facts of turns, answered when a test says so."""

    def __init__(self, world):
        self.turns, self.go = world.facts.turns, asyncio.Event()
        self.tenants, self.running, self.most = [], 0, 0
        world.facts.turns = self

    async def __call__(self, query):
        self.tenants.append(query.tenant)
        if query.user:  # the operator's
            return await self.turns(query)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            return await self.turns(query)
        finally:
            self.running -= 1


async def test_a_tenant_that_asks_for_many_pages_at_once_is_told_to_come_again_and_holds_up_nobody():
    async with page_world(api_keys=KEYS) as w, asyncio.timeout(PATIENT_S):
        asked = Asked(w)
        path = "/turns?text=the"
        waiting = [asyncio.create_task(w.get(path, ACME)) for _ in range(app.MOST_CONCURRENT)]
        while not asked.tenants:
            await asyncio.sleep(0)
        late = await w.get(path, ACME)
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        assert "4 pages are already being loaded with this key" in late.text
        other = asyncio.create_task(w.get("/turns", BOLT))
        assert (await w.get("/turns?user=ann&tenant=acme", ADMIN)).status_code == 200, "asks at once"
        assert (await w.get("/", ADMIN)).status_code == 200
        assert asked.tenants == ["acme", "acme"]
        asked.go.set()
        assert [(await each).status_code for each in (*waiting, other)] == [200] * 5
        assert asked.most == 1, "a thread is left for the operator"
        assert (await w.get(path, ACME)).status_code == 200


async def test_tenants_take_turns_however_many_pages_one_of_them_waits_for():
    async with page_world(api_keys=KEYS) as w, asyncio.timeout(PATIENT_S):
        asked = Asked(w)
        many = [asyncio.create_task(w.get("/turns", ACME)) for _ in range(app.MOST_CONCURRENT)]
        browser = Browser(w.app, ACME)
        while not asked.tenants or browser.status is None:
            await asyncio.sleep(0)
        gone = asyncio.create_task(w.get("/turns", BOLT))
        await asyncio.sleep(0)
        few = asyncio.create_task(w.get("/turns", BOLT))
        while w.pages._admission._waiting.count(Visitor(tenant="bolt", operator=False)) < 2:
            await asyncio.sleep(0)
        gone.cancel()
        asked.go.set()
        assert [(await each).status_code for each in (few, *many)] == [200] * 5
        assert asked.tenants[:3] == ["acme", "acme", "bolt"], "the first page asks twice"
        await browser.leave()


async def test_a_turn_that_comes_to_somebody_who_leaves_goes_to_the_next():
    admission, order = app.PageAdmission(lambda: 0.0), []

    async def look(number):
        async with admission.page(ACMES):
            order.append(number)
            await asyncio.sleep(0)
        if number == 0:
            looking[1].cancel()  # its turn has come, and it has not seen that yet

    looking = [asyncio.create_task(look(number)) for number in range(3)]
    async with asyncio.timeout(PATIENT_S):
        await asyncio.wait(looking)
    assert order == [0, 2]
    assert [each.cancelled() for each in looking] == [False, True, False]
    assert not admission._asked[ACMES]


async def test_a_tenant_that_loads_pages_without_end_is_slowed_and_the_others_are_not():
    async with page_world(api_keys=KEYS) as w:
        codes = [(await w.get("/turns", ACME)).status_code for _ in range(int(app.PAGES_AT_ONCE) + 1)]
        assert codes == [200] * int(app.PAGES_AT_ONCE) + [429]
        late = await w.get("/turns", ACME)
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        assert "2 pages a second" in late.text
        assert [(await w.get("/turns", key)).status_code for key in (BOLT, ADMIN)] == [200, 200]
        w.now += 1.0
        codes = [(await w.get("/turns", ACME)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]


async def test_open_pages_of_a_tenant_wait_for_each_other_and_leave_when_they_are_gone():
    async with page_world(api_keys=KEYS) as w, asyncio.timeout(PATIENT_S):
        asked = Asked(w)
        browsers = [Browser(w.app, ACME) for _ in range(8)]
        assert await answered(*browsers) == [200] * 8
        while not asked.tenants:
            await asyncio.sleep(0)
        page = asyncio.create_task(w.get("/turns", ACME))
        await browsers[0].leave()
        await browsers[-1].leave()
        asked.go.set()
        assert (await page).status_code == 200, "open pages are not counted as questions"
        while not all(each.bodies for each in browsers[1:-1]):
            await asyncio.sleep(0)
        assert asked.most == 1
        for each in browsers[1:-1]:
            await each.leave()
