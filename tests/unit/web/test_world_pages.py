"""The pages of simulated worlds: who sees what, what hostile words become, and what stands there when there is nothing."""

from dataclasses import replace
from urllib.parse import quote

import pytest
from tests.fakes.page_world import ACME, ADMIN, page_world
from tests.fakes.worlds_page import ANSWER, SECRET, a_task, finished, journal, steps, worlds_of, write_run

from ostinato.app.storage import Home
from ostinato.status.worlds.tasks import SolvedCurve, SolvedShare, VersionPoint
from ostinato.status.worlds.underway import RolloutLine
from ostinato.testing.log import MemoryLog
from ostinato.web.page import charts
from ostinato.web.page.views import MOST_LINES, diff_lines, rollout_state

ROLLOUT, TASK = "/worlds/rollouts/w3f.0.0.0", "/worlds/tasks/calc-1"
PATHS = ["/worlds", "/worlds/rollouts", ROLLOUT, TASK]
HOSTILE = "<img src=//evil.example/x onerror=alert(1)>\"'</pre><script>alert(2)</script>\u202e{{7*7}}"


@pytest.fixture
async def worlds(tmp_path):
    home, log = Home(tmp_path / "run"), MemoryLog()
    await log.append(*steps())
    made = worlds_of(home, write_run(home, rollouts=[finished(), finished("w3f.0.1.0", value=0.0)]), log)
    yield made
    made.close()


@pytest.mark.parametrize("path", PATHS)
async def test_every_page_of_worlds_forbids_what_it_does_not_need(worlds, path):
    async with page_world(worlds=worlds) as w:
        reply = await w.get(path)
        assert reply.status_code == 200
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert reply.headers["cache-control"] == ("private, no-cache" if path == "/worlds" else "private, no-store")
        assert "style=" not in reply.text
        assert "<script>" not in reply.text


@pytest.mark.parametrize("path", [*PATHS, "/worlds/rollouts/none", "/events?page=worlds"])
async def test_a_tenant_sees_nothing_of_worlds_and_a_stranger_signs_in(worlds, path):
    async with page_world(worlds=worlds, api_keys=(f"acme:{ACME}",)) as w:
        theirs = await w.get(path, ACME)
        assert theirs.status_code == 403
        assert "calc-1" not in theirs.text
        assert (await w.get(path)).status_code == 303
        assert 'href="/worlds"' not in (await w.get("/turns", ACME)).text


async def test_hidden_tests_and_reference_answers_are_the_operators(worlds):
    async with page_world(worlds=worlds) as w:
        everybody, operator = (await w.get(TASK)).text, (await w.get(TASK, ADMIN)).text
        for path in PATHS:
            said = (await w.get(path)).text
            assert SECRET not in said
            assert ANSWER not in said
        assert "1 file and 2 settings of the grader (tests, reference answers) are hidden here" in everybody
        assert SECRET in operator
        assert ANSWER in operator
        assert "Mend calc.py: add must add." in everybody
        assert "README.md" in everybody


async def test_one_rollout_shows_its_steps_its_diff_and_its_grading(worlds):
    async with page_world(worlds=worlds) as w:
        page = (await w.get(ROLLOUT)).text
        for said in (
            "Mend calc.py: add must add.",
            "calls <strong>read</strong>",
            "Done: it adds.",
            "prompt tokens",
            '<span class="d added">+    return a + b',
            '<span class="d removed">-    return a - b',
            "1 of 1 and 3 of 3 tests pass",
            "fail_to_pass",
            "Next in the group: w3f.0.1.0",
            'href="/turns/w3f.0.0.0%3A0"',
        ):
            assert said in page, said
        assert "Previous in the group" not in page
        other = (await w.get("/worlds/rollouts/w3f.0.1.0")).text
        assert "Previous in the group: w3f.0.0.0" in other
        assert "This turn is no longer in the log." in other
        under_way = (await w.get("/worlds/rollouts/w3f.1.2.0")).text
        assert "It has not ended" in under_way
        assert (await w.get("/worlds/rollouts/none")).status_code == 404
        assert (await w.get(f"{ROLLOUT}?from=x")).status_code == 400
        assert "It has no turn 100." in (await w.get(f"{ROLLOUT}?from=99")).text


async def test_words_that_were_forgotten_stand_on_no_page(tmp_path):
    home, log = Home(tmp_path / "run"), MemoryLog()
    first, second = steps()
    await log.append(replace(first, prompt_ids=(), sampled_ids=(), logprobs=(), text=""), second)
    worlds = worlds_of(home, write_run(home, rollouts=[finished()]), log)
    async with page_world(worlds=worlds) as w:
        page = (await w.get(ROLLOUT)).text
        assert "Its text was erased and cannot be read again." in page
        assert "calls <strong>read" not in page
    worlds.close()


async def test_foreign_words_stay_words_wherever_they_stand(tmp_path):
    home, log = Home(tmp_path / "run"), MemoryLog()
    episode = HOSTILE[:60]
    task = a_task(HOSTILE, HOSTILE, text=HOSTILE, about={"from": HOSTILE})
    row = finished(
        "w3f.0.0.0",
        task=HOSTILE,
        family=HOSTILE,
        harness=HOSTILE,
        taskset=HOSTILE,
        group=HOSTILE,
        cheated=[HOSTILE],
        why=HOSTILE,
        parts={HOSTILE: 0.5},
        effort={HOSTILE: 3},
        changes=[{"path": HOSTILE, "kind": "written", "diff": f"@@\n+{HOSTILE}\n"}],
        policy={"number": 4, "hash": HOSTILE},
        turns=[HOSTILE],
    )
    rows = [row, row | {"episode": episode, "member": 1}]
    events = journal([(7, HOSTILE, (1.0, "under way"), False)])
    worlds = worlds_of(home, write_run(home, tasks=[task], rollouts=rows, events=events), log)
    async with page_world(worlds=worlds) as w:
        paths = ["/worlds", "/worlds?family=" + quote(HOSTILE), f"/worlds/tasks/{quote(HOSTILE, safe='')}"]
        paths += [ROLLOUT, f"/worlds/rollouts/{quote(episode, safe='')}", f"/worlds/rollouts?task={quote(HOSTILE)}"]
        for path in paths:
            for key in (None, ADMIN):
                reply = await w.get(path, key)
                assert reply.status_code == 200, path
                assert "<img" not in reply.text, path
                assert "<script>" not in reply.text, path
                assert "\u202e" not in reply.text, path
                assert "{{7*7}}" in reply.text, path
    worlds.close()


async def test_a_run_without_a_world_says_what_to_type_and_one_that_waits_what_is_missing(tmp_path):
    async with page_world() as w:
        page = (await w.get("/worlds")).text
        assert "This run does not learn in simulated worlds" in page
        assert "ostinato train --world tasks.jsonl --steps 50" in page
        assert "No rollout" not in page
        assert "0 rollouts on record" in (await w.get("/worlds/rollouts")).text
    home = Home(tmp_path / "run")
    worlds = worlds_of(home, tmp_path / "missing.jsonl")
    async with page_world(worlds=worlds) as w:
        page = (await w.get("/worlds")).text
        assert "No rollout worker has read a taskset yet." in page
        assert "missing.jsonl cannot be read" in page
        assert "The first is drawn by" in page
    worlds.close()


# ---------------------------------------------------------------- pictures and words


def a_share(share, half=0.1):
    return SolvedShare(rollouts=40, tasks=8, share=share, lower=max(0.0, share - half), upper=min(1.0, share + half))


def test_the_chart_says_in_words_what_it_shows():
    points = tuple(VersionPoint(first=n, last=n + 1, solved=a_share(0.1 * n)) for n in range(0, 8, 2))
    curves = (SolvedCurve(name="held out", points=points), SolvedCurve(name="train", points=points[:1]))
    drawn = charts.success(curves, ((4, "v4"), (99, "v99")))
    assert "Newest: held out 60.0% [50.0%, 70.0%] at v6 to v7; train 0.0% [0.0%, 10.0%] at v0 to v1." in drawn
    assert drawn.count("v4 was released") == 1
    assert "v99" not in drawn, "outside of what is drawn"
    assert charts.success((), ()) == ""
    assert "<svg" in charts.success((SolvedCurve(name="solved", points=points[:1]),), ())


def test_lines_of_a_diff_have_their_kinds():
    diff = "--- a\n+++ b\n@@ -1,3 +1,3 @@\n same\n--- x\n+++ y\n-\x0cz\r\n\\ No newline\n"
    assert [line.kind for line in diff_lines(diff)] == [
        "place", "place", "place", "same", "removed", "added", "removed", "same",
    ]  # fmt: skip
    assert len(diff_lines("+x\n" * 9999)) == MOST_LINES + 1
    assert [line.text for line in diff_lines("")] == [""]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": 1.0, "solved": True}, "✓ solved"),
        ({"value": 1.0, "solved": True, "cheated": ("x",)}, "✕ cheated"),
        ({"value": 0.5}, "✕ not solved"),
        ({"value": None}, "◷ not graded"),
        ({"value": None, "ended": "under way"}, "◷ under way"),
        ({"value": None, "ended": "waiting"}, "waiting"),
    ],
)
def test_a_state_is_a_mark_and_words(changes, words):
    fields = {"seq": 0, "episode": "e", "task": "t", "family": "f", "split": "train", "harness": "h", "group": None}
    line = RolloutLine(**fields | {"member": 0, "at": 1.0, "solved": False, "cheated": (), "ended": "turns", **changes})
    assert rollout_state(line)[1] == words
