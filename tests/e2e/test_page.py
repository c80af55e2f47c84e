"""The page in a real Chromium: every page, light and dark, narrow and wide, by keyboard, with hostile words, and without its gateway.

Needs Debian's chromium and Playwright (`pip install playwright`); axe-core's `axe.min.js` is named by the variable OSTINATO_AXE.
"""

from dataclasses import replace
from urllib.parse import quote

import pytest
from tests.fakes.browser import AXE, CHROMIUM, WIDTHS, Server, browsing, check_widths
from tests.fakes.page_world import A_TURN, ADMIN, RUN, V16, V17, V18, PageWorld, a_turn_line, a_worker

from ostinato.launch.commands.report import recorded
from ostinato.serve.config import ServeConfig
from ostinato.web.report import render

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
PATHS = [
    "/",
    "/releases",
    f"/releases/{V17.hash}",
    f"/releases/{V18.hash}",
    "/turns",
    f"/turns/{A_TURN.id}",
    "/learning",
    "/monitors",
    "/monitors/coverage:acme",
    "/weights",
    "/playground",
    "/sign-in",
    "/turns/none",
]


@pytest.fixture
async def server():
    made = Server()
    await made.start()
    yield made
    made.world.pages.close()
    await made.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_is_readable_by_everybody_at_every_width(server, scheme):
    await check_widths(server, PATHS, scheme)


async def test_pages_are_plain_in_forced_colours_still_without_motion_and_whole_on_paper(server):
    async with browsing(server, forced_colors="active", reduced_motion="reduce") as (tab, told):
        await tab.goto(server.url + f"/turns/{A_TURN.id}")
        assert await tab.evaluate("getComputedStyle(document.querySelector('main')).transitionDuration") == "0s"
        lines = "[...document.querySelectorAll('.t[data-token]')].map(each => getComputedStyle(each).borderBottomStyle)"
        shades = await tab.evaluate(lines)
        assert len(set(shades)) > 2, "shades of log-probability are lines where colours are not ours"
        await tab.check("#by-version")
        assert set(await tab.evaluate(lines)) == {"none", "dotted"}
        await tab.emulate_media(media="print", forced_colors="none")
        await tab.set_viewport_size({"width": 720, "height": 1000})
        for path in PATHS[:11]:
            await tab.goto(server.url + path)
            hidden = (
                "[...document.querySelectorAll('header, nav, form, footer')].every(each => !each.checkVisibility())"
            )
            assert await tab.evaluate(hidden), path
            over = await tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, path
        await tab.goto(server.url + f"/releases/{V17.hash}")
        assert await tab.evaluate("document.querySelector('.history details dl').getBoundingClientRect().height") > 0
        assert told == []


async def test_the_report_is_the_page_in_one_file_that_asks_nobody(server, tmp_path):
    (tmp_path / "report.html").write_text(render(None, await recorded(server.world.facts)))
    address = (tmp_path / "report.html").as_uri()
    async with browsing(server, java_script_enabled=False) as (tab, told):
        await tab.goto(address)
        assert "in the trial with users better" in (await tab.inner_text("body")).lower()
        await tab.click(f"#ledger-title ~ div >> text=v{V17.number}")
        assert tab.url.endswith(f"#v-{V17.hash[:16]}")
        assert told == [f"outside: {address}"]
    async with browsing(server) as (tab, _):
        await tab.goto(address)
        for width in WIDTHS:
            await tab.set_viewport_size({"width": width, "height": 900})
            over = await tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, width
        if AXE.is_file():
            await tab.evaluate(AXE.read_text())
            found = await tab.evaluate("axe.run()")
            assert [(each["id"], each["nodes"][0]["target"]) for each in found["violations"]] == []


@pytest.mark.skipif(not AXE.is_file(), reason="OSTINATO_AXE names no axe.min.js, so accessibility is not examined")
@pytest.mark.parametrize(
    "colours", [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"forced_colors": "active"}], ids=str
)
async def test_axe_finds_nothing_on_any_page(server, colours):
    async with browsing(server, **colours) as (tab, _):
        for path in PATHS:
            await tab.goto(server.url + path)
            await tab.set_viewport_size({"width": WIDTHS[-1], "height": 900})
            await tab.evaluate(AXE.read_text())
            found = await tab.evaluate("axe.run()")
            assert [(each["id"], each["nodes"][0]["target"]) for each in found["violations"]] == [], path


async def test_hostile_words_run_nothing_and_ask_nobody(server):
    words = "<img src=//evil.example/x onerror=window.broken=9><script>window.broken=9</script><b hx-get=/turns hx-trigger=load>"
    facts = server.world.facts
    turn = replace(A_TURN, text=words, user=words, tenant=words)
    facts.lines = [a_turn_line(turn, signals=(words,), outcome=words)]
    facts.signals = (replace(facts.signals[1], name=words, comment=words, correction=words),)
    facts.reason = words
    facts.alarm_line = replace(facts.alarm_line, name=words, reason=words)
    facts.run = replace(
        RUN,
        alarms=(facts.alarm_line,),
        accounts=replace(RUN.accounts, ingested=7129, held={words: 3}),
        workers=(a_worker("train", words, trouble=words),),
    )
    async with browsing(server) as (tab, told):
        asked = []
        tab.on("request", lambda r: asked.append(r.url.removeprefix(server.url)))
        for path in [*PATHS[:8], f"/monitors/{quote(words, safe='')}", *PATHS[9:11]]:
            asked.clear()
            await tab.goto(server.url + path)
            await tab.wait_for_timeout(300)
            assert await tab.evaluate("window.broken || 0") == 0, path
            assert [each for each in asked if each != path and not each.startswith(("/static/", "/events"))] == [], path
        assert told == []


async def test_a_page_without_its_gateway_says_so_and_recovers(server):
    async with browsing(server) as (tab, _):
        await tab.goto(server.url + "/")
        await tab.wait_for_function("document.querySelector('#strip time').textContent.includes('11:06:40')")
        server.world.pages.close()
        await server.stop()
        await tab.wait_for_selector("[data-link=lost]")
        assert "does not answer" in await tab.inner_text("#lost")
        server.world = PageWorld(ServeConfig())
        server.world.facts.run = replace(RUN, at=RUN.at + 100, step=77)
        await server.start()
        await tab.wait_for_selector("body:not([data-link])")
        await tab.wait_for_function("document.querySelector('#part').textContent.includes('step 77')")
        assert await tab.inner_text("#lost") == ""


async def test_the_keyboard_alone_leads_to_the_verdict_and_back_to_the_release_before(server):
    world = server.world
    async with browsing(server, extra_http_headers={"x-ostinato-key": ADMIN}) as (tab, told):
        await tab.goto(server.url + "/")
        await tab.keyboard.press("Tab")
        assert await tab.evaluate("document.activeElement.className") == "skip"
        await tab.keyboard.press("g")
        await tab.keyboard.press("r")
        await tab.wait_for_url("**/releases")
        for key in ("j", "j"):
            await tab.keyboard.press(key)
        assert await tab.evaluate("document.activeElement.textContent") == f"v{V17.number}"
        await tab.wait_for_timeout(5000)  # two pushes of events
        assert await tab.evaluate("document.activeElement.textContent") == f"v{V17.number}", "focus outlives pushes"
        await tab.keyboard.press("Enter")
        await tab.wait_for_selector("form.act")
        assert "people did better (provisional): +2.1 pp [+0.4, +3.8]" in await tab.inner_text(".verdict")
        await tab.focus("#reason")
        await tab.keyboard.type("worse for ann")
        await tab.keyboard.press("Tab")
        await tab.keyboard.type("bob")
        await tab.keyboard.press("Enter")
        await tab.wait_for_selector("h1:text('Rolled back')")
        assert world.acts.done == [("roll_back", "worse for ann", "bob")]
        world.acts.live = V18.hash
        await tab.go_back()
        await tab.fill("#reason", "again")
        await tab.fill("#actor", "bob")
        await tab.click("form.act button")
        await tab.wait_for_selector("[role=alert]")
        assert len(world.acts.done) == 1
        assert V16.number == 16
        assert [each for each in told if "409" not in each] == []


async def test_signing_in_by_the_form_lets_act_and_signing_out_ends_it(server):
    async with browsing(server) as (tab, _):
        await tab.goto(server.url + "/sign-in")
        await tab.fill("#key", ADMIN)
        await tab.press("#key", "Enter")
        await tab.wait_for_selector("text=Sign out")
        await tab.goto(server.url + "/playground")
        await tab.fill("#prompt", "hello")
        await tab.click("text=Ask live and control")
        await tab.wait_for_selector("text=v0")
        await tab.click("#a-control >> xpath=.. >> text=Good")
        await tab.wait_for_selector("h1:text('Feedback sent')")
        assert server.world.acts.done[-1][:3] == ("rate", "chatcmpl-control:0", "accepted")
        await tab.click("text=Sign out")
        await tab.wait_for_selector("text=Sign in")


async def test_tokens_can_be_read_one_by_one(server):
    async with browsing(server) as (tab, told):
        await tab.goto(server.url + f"/turns/{A_TURN.id}")
        await tab.focus("#tokens")
        for _ in range(3):
            await tab.keyboard.press("ArrowRight")
        assert (await tab.inner_text("#token")).startswith("#2: id 108, log-probability -1.850, v16")
        colour = "getComputedStyle(document.querySelector('.t.p1[data-token]')).backgroundColor"
        before = await tab.evaluate(colour)
        await tab.check("#by-version")
        assert await tab.evaluate(colour) != before
        assert told == []
