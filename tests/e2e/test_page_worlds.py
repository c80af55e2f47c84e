"""The pages of simulated worlds in a real Chromium: readable at every width, by keyboard, live, and harmless with hostile words.

Needs what `test_page.py` needs.
"""

from urllib.parse import quote

import pytest
from tests.fakes.browser import AXE, CHROMIUM, WIDTHS, Server, browsing, check_widths
from tests.fakes.page_world import ADMIN
from tests.fakes.worlds_page import a_task, finished, journal, steps, worlds_of, write_lines, write_run

from ostinato.app.storage import Home
from ostinato.testing.log import MemoryLog

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
ROLLOUT, CHEAT, TASK = "/worlds/rollouts/w3f.0.0.0", "/worlds/rollouts/w3f.2.0.0", "/worlds/tasks/calc-1"
PATHS = ["/worlds", "/worlds?family=repair", "/worlds/rollouts", "/worlds/rollouts?outcome=ungraded", ROLLOUT, CHEAT]
PATHS += ["/worlds/rollouts/w3f.1.2.0", TASK, "/worlds/tasks/none"]


def rollouts():
    """Six versions' rollouts of three tasks, one that cheated, and held-out ones."""
    for number in range(6):
        for member in range(4):
            value = float(member < number % 5)
            yield finished(f"w3f.{number + 10}.{member}.0", number=number, task=f"calc-{number % 3}", value=value)
        yield finished(f"w3f.m{number}.0", number=number, task="held-1", split="held_out", group=None, value=1.0)
    yield finished("w3f.2.0.0", value=0.0, cheated=["changed a test"], why="a word " * 400, ended="timeout")
    yield finished("w3f.0.1.0", value=0.0)
    yield finished()


@pytest.fixture
async def server(tmp_path):
    home, log = Home(tmp_path / "run"), MemoryLog()
    await log.append(*steps())
    made = Server(worlds_of(home, write_run(home, rollouts=rollouts()), log))
    made.home = home
    await made.start()
    yield made
    made.world.pages.close()
    await made.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_of_worlds_is_readable_at_every_width(server, scheme):
    await check_widths(server, PATHS, scheme)


@pytest.mark.skipif(not AXE.is_file(), reason="OSTINATO_AXE names no axe.min.js, so accessibility is not examined")
@pytest.mark.parametrize(
    "colours", [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"forced_colors": "active"}], ids=str
)
async def test_axe_finds_nothing_on_any_page_of_worlds(server, colours):
    async with browsing(server, extra_http_headers={"x-ostinato-key": ADMIN}, **colours) as (tab, _):
        for path in PATHS:
            await tab.goto(server.url + path)
            await tab.set_viewport_size({"width": WIDTHS[-1], "height": 900})
            await tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            await tab.evaluate(AXE.read_text())
            found = await tab.evaluate("axe.run()")
            assert [(each["id"], each["nodes"][0]["target"]) for each in found["violations"]] == [], path


async def test_the_keyboard_alone_leads_from_any_page_through_a_group(server):
    async with browsing(server) as (tab, told):
        await tab.goto(server.url + "/")
        await tab.keyboard.press("g")
        await tab.keyboard.press("o")
        await tab.wait_for_url("**/worlds")
        await tab.keyboard.press("j")
        assert await tab.evaluate("document.activeElement.textContent") == "w3f.0.0.0"
        await tab.keyboard.press("Enter")
        await tab.wait_for_url(f"**{ROLLOUT}")
        assert await tab.evaluate("document.title") == "Rollout w3f.0.0.0 · Ostinato"
        await tab.focus("[rel=next]")
        await tab.keyboard.press("Enter")
        await tab.wait_for_url("**/w3f.0.1.0")
        await tab.focus("[rel=prev]")
        await tab.keyboard.press("Enter")
        await tab.wait_for_url(f"**{ROLLOUT}")
        await tab.focus(".diff")
        assert await tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Changes of calc.py"
        assert told == []


async def test_a_rollout_that_ends_while_somebody_looks_appears_by_itself(server):
    async with browsing(server) as (tab, told):
        await tab.goto(server.url + "/worlds")
        assert "w3f.1.2.0" not in await tab.inner_text("#newest-title ~ .scroll")
        write_lines(server.home.root / "finished.jsonl", [finished("w3f.1.2.0", task="calc-2")])
        ended = {"kind": "ended", "n": 1, "member": 2, "episode": "w3f.1.2.0", "last": True, "turns": [], "grade": 1.0}
        write_lines(server.home.rollouts, [ended])
        await tab.wait_for_selector("#newest-title ~ .scroll >> text=w3f.1.2.0")
        await tab.wait_for_selector("a.member.good[href$='w3f.1.2.0'] >> text=1.00")
        assert told == []


async def test_hostile_words_of_tasks_and_models_run_nothing_and_ask_nobody(tmp_path):
    words = "<img src=//evil.example/x onerror=window.broken=9><script>window.broken=9</script><b hx-get=/turns hx-trigger=load>"
    home, log = Home(tmp_path / "run"), MemoryLog()
    row = finished(task=words, family=words, harness=words, cheated=[words], why=words)
    row |= {"parts": {words: 1.0}, "changes": [{"path": words, "kind": "written", "diff": f"@@\n+{words}\n-{words}\n"}]}
    events = journal([(7, words, (1.0, "under way"), False)])
    path = write_run(home, tasks=[a_task(words, words, text=words)], rollouts=[row], events=events)
    first, second = steps()
    await log.append(first, second)
    server = Server(worlds_of(home, path, log))
    await server.start()
    async with browsing(server, extra_http_headers={"x-ostinato-key": ADMIN}) as (tab, told):
        asked = []
        tab.on("request", lambda r: asked.append(r.url.removeprefix(server.url)))
        for each in ["/worlds", "/worlds/rollouts", ROLLOUT, f"/worlds/tasks/{quote(words, safe='')}"]:
            asked.clear()
            await tab.goto(server.url + each)
            await tab.wait_for_timeout(300)
            assert await tab.evaluate("window.broken || 0") == 0, each
            others = [one for one in asked if not one.startswith(("/static/", "/events", "/worlds"))]
            assert others == [], each
        assert told == []
    server.world.pages.close()
    await server.stop()
