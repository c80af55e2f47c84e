"""The element `<ostinato-dials>` in a product's page: what a person does there is set at the gateway, under a strict security policy.

Needs Debian's chromium and Playwright (`pip install playwright`); axe-core's `axe.min.js` is named by the variable OSTINATO_AXE.
"""

import json
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from tests.fakes.browser import AXE, WIDTHS, browsing
from tests.unit.adapt.people import BASIS, about, cache_at, steered_turn

from ostinato.adapt.config import AdaptConfig, StylesConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.adapt.styles import StyleAdaptation, approval, styles_of
from ostinato.core.records import PolicyVersion, SteeringBasis
from ostinato.core.steering import DialSet
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato_client import sign_user

SCRIPT = (Path(__file__).parents[2] / "client" / "js" / "dials.js").read_text()
LIVE = PolicyVersion(number=0, hash=BASIS.weights)
STYLES = StylesConfig(prompts={"concise": "Answer in one sentence.", "in_steps": "Answer in numbered steps."})
KEY, SECRET, NOW = "sk-0123456789abcdef", "us-0123456789abcdef", 1000.0
PAGE = (
    '<!doctype html><html lang="en"><title>Settings</title><main><h1>Settings</h1>'
    '<ostinato-dials src="/adaptation"></ostinato-dials></main><script type="module" src="/dials.js"></script>'
)
POLICY = {"content-security-policy": "default-src 'self'"}


class Product:
    """A product's server: its page, the script, and the path that it passes on for the user who is signed in."""

    def __init__(self, gateway):
        self.user, self.down, self.url = "ann", False, ""
        self._gateway = gateway
        methods = ["GET", "PUT", "DELETE"]
        self.app = Starlette(
            routes=[
                Route("/", lambda _: HTMLResponse(PAGE, headers=POLICY)),
                Route("/dials.js", lambda _: Response(SCRIPT, media_type="text/javascript")),
                Route("/favicon.ico", lambda _: Response(b"", 204)),
                Route("/adaptation", self._pass_on, methods=methods),
            ]
        )

    async def _pass_on(self, request):
        if self.down:
            return Response("no", 502)
        signature = sign_user(SECRET, self.user, now=NOW)
        headers = {"x-api-key": KEY, "x-ostinato-user": self.user, "x-ostinato-user-signature": signature}
        headers |= {"content-type": "application/json"}
        reply = await self._gateway.request(
            request.method, "/v1/adaptation", content=await request.body(), headers=headers
        )
        return Response(reply.content, reply.status_code, media_type="application/json")


@asynccontextmanager
async def product(tmp_path, log, **config):
    settings = AdaptConfig(**{"mode": "dials", "holdout": 0.0, **config})
    adaptation = DialAdaptation(log, cache_at(tmp_path), settings)
    styles = StyleAdaptation(log, cache_at(tmp_path / "styles"), settings) if settings.styles.prompts else None
    gateway = create_app(
        engine=FakeEngine(slots={"live": LIVE}),
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(api_keys=(KEY,), user_keys=(SECRET,)),
        clock=lambda: NOW,
        model_name="m",
        adaptation=adaptation,
        styles=styles,
    )
    async with serving(gateway) as url, httpx2.AsyncClient(base_url=url) as passing:
        made = Product(passing)
        async with serving(made.app) as made.url:
            yield made


async def log_with_ratings():
    """A log in which ann dislikes lists."""
    log = MemoryLog()
    turns = [steered_turn(f"t{k}:0", ("default", "ann"), 10.0 + k) for k in range(40)]
    ratings = [about(turn, turn.id, value=float(turn.steered.features[1] < 0)) for turn in turns]
    await log.append(SteeringBasis.of(BASIS, at=1.0), *turns, *ratings)
    return log


def written(log):
    return [row.dials for row in log.rows if isinstance(row, DialSet)]


async def test_a_person_sees_sets_and_forgets(tmp_path):
    log = await log_with_ratings()
    async with product(tmp_path, log) as made, browsing(made) as (tab, told):
        await tab.goto(made.url)
        slider = tab.get_by_label("lists")
        assert float(await slider.input_value()) < -0.3
        assert await slider.get_attribute("aria-valuetext") in ("fewer lists, sure", "fewer lists, perhaps")
        assert await tab.get_by_text("Learned from 40 of your ratings.").count() == 1
        await tab.get_by_label("brief").fill("0.5")
        await tab.get_by_text("shorter answers, set by hand").wait_for()
        assert written(log) == [{"brief": 0.5}]
        await tab.get_by_role("button", name="let it learn").click()
        await tab.get_by_text("shorter answers, set by hand").wait_for(state="detached")
        await tab.get_by_label("lists").focus()
        await tab.keyboard.press("ArrowRight")
        await tab.get_by_text("fewer lists, set by hand").wait_for()
        assert (
            await tab.evaluate("document.querySelector('ostinato-dials').shadowRoot.activeElement.id") == "dial-lists"
        )
        tab.once("dialog", lambda dialog: dialog.dismiss())
        await tab.get_by_role("button", name="Forget all of it").click()
        assert len(written(log)) == 3
        tab.once("dialog", lambda dialog: dialog.accept())
        await tab.get_by_role("button", name="Forget all of it").click()
        await tab.get_by_text("Learned from 0 of your ratings.").wait_for()
        assert written(log)[-1] == {}
        assert await tab.evaluate("window.broken || 0") == 0
        assert told == []


async def test_a_person_sees_which_style_is_likely_picks_one_and_switches_styles_off(tmp_path):
    log = await log_with_ratings()
    concise, _ = styles_of(AdaptConfig(styles=STYLES))
    await log.append(approval(concise, LIVE, passed=True, why="", at=2.0, shared=True))
    async with product(tmp_path, log, styles=STYLES) as made, browsing(made) as (tab, told):
        await tab.goto(made.url)
        select = tab.get_by_label("Style")
        assert await select.input_value() == "", "it learns"
        assert (
            await tab.get_by_text("Your next conversation: as the model writes by itself 50%, concise 50%.").count()
            == 1
        )
        assert "in steps (not offered at present)" in await select.inner_text()
        await select.select_option("concise")
        await tab.get_by_text("Your next conversation: concise 100%.").wait_for()
        await select.select_option("none")
        await tab.get_by_text("Your next conversation: as the model writes by itself 100%.").wait_for()
        assert await tab.evaluate("document.querySelector('ostinato-dials').shadowRoot.activeElement?.id") in (
            "style",
            None,
        )
        await select.select_option("")
        await tab.get_by_text("as the model writes by itself 50%").wait_for()
        assert written(log) == [{concise.arm: 1.0}, {concise.arm: None, "none": 1.0}, {"none": None}]
        for width in WIDTHS:
            await tab.set_viewport_size({"width": width, "height": 900})
            over = await tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, width
        assert await tab.evaluate("window.broken || 0") == 0
        assert told == []
    async with (
        product(tmp_path / "off", log, mode="off", styles=STYLES, holdout=1.0) as made,
        browsing(made) as (tab, _),
    ):
        await tab.goto(made.url)
        await tab.get_by_text("what you set here is kept").first.wait_for()


async def test_what_cannot_be_saved_is_said_and_the_slider_goes_back(tmp_path):
    log = await log_with_ratings()
    async with product(tmp_path, log) as made, browsing(made) as (tab, _):
        await tab.goto(made.url)
        before = await tab.get_by_label("brief").input_value()
        made.down = True
        await tab.get_by_label("brief").fill("2.0")
        await tab.get_by_text("This could not be saved; try again.").wait_for()
        assert await tab.get_by_label("brief").input_value() == before
        made.down = False
        await tab.get_by_label("brief").fill("2.0")
        await tab.get_by_text("shorter answers, set by hand").wait_for()
        assert await tab.get_by_role("status").inner_text() == ""
        assert written(log) == [{"brief": 2.0}]
    async with product(tmp_path / "held", log, holdout=1.0) as made, browsing(made) as (tab, _):
        await tab.goto(made.url)
        await tab.get_by_text("what you set here is kept").wait_for()


async def test_it_fits_every_width_and_axe_finds_nothing(tmp_path):
    async with product(tmp_path, await log_with_ratings()) as made, browsing(made) as (tab, _):
        await tab.goto(made.url)
        await tab.get_by_label("lists").wait_for()
        for width in WIDTHS:
            await tab.set_viewport_size({"width": width, "height": 900})
            over = await tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, width
        if AXE.exists():
            await tab.evaluate(AXE.read_text())
            found = json.loads(await tab.evaluate("axe.run().then((all) => JSON.stringify(all.violations))"))
            assert [each["id"] for each in found] == []
