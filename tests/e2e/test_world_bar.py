"""A world's held-out tasks as a quality bar: any harness, in real sandboxes, through the real gateway; and a run in which it holds."""

import asyncio
import json
from collections import Counter

import pytest
from pydantic import SecretStr
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.tasks import calc_task

from ostinato.app.evaluation import open_evaluation
from ostinato.app.storage import home, open_run
from ostinato.config import load
from ostinato.core.conversation import Message, Role
from ostinato.core.records import Arm, PolicyVersion, ReleaseEvent, Turn
from ostinato.core.report import Incumbents, Verdict
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato.worlds.harness.harnesses import open_harness
from ostinato.worlds.tasks.task import Grading, Split, Task
from ostinato.worlds.tasks.tasksets import save, taskset_of

V0, V9 = PolicyVersion(number=0, hash="00"), PolicyVersion(number=9, hash="bb")
MENDED = json.dumps({"path": "calc.py", "text": "def add(a, b):\n    return a + b\n"})
MEND = (
    f'<tool_call>\n{{"name": "write", "arguments": {MENDED}}}\n</tool_call>'
    '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>'
)
SUITE_TOKENS = 9
GRADING = Grading(
    grader="function",
    data={
        "entry": "calc.py:add",
        "reference": "def add(a, b):\n    return a + b\n",
        "draw": "def draw(r):\n    return r.randrange(99), r.randrange(99)\n",
        "draws": 4,
    },
    timeout_s=WHOLE_PROGRAM_S,
)


def taskset(path):
    """Files to be mended with tools, and letters to be said: two harnesses, two graders."""
    mend = [calc_task(id=f"mend{n}", split=Split.HELD_OUT, grading=GRADING) for n in range(2)]
    ask = (Message(role=Role.USER, text="say"),)
    say = [
        Task(id=f"say{n}", family="f", messages=ask, split=Split.HELD_OUT, grading=Grading(grader="pattern", data={"pattern": "^x"}))
        for n in range(3)
    ]  # fmt: skip
    save(taskset_of("mixed", [*mend, *say]), path)
    return path


async def test_every_harness_is_tried_in_the_candidates_slot_and_graded_in_sandboxes_of_its_own(tmp_path):
    suite = tmp_path / "suite.jsonl"
    item = {"family": "f", "messages": [{"role": "user", "content": "x"}], "grader": "pattern", "pattern": "."}
    item["sampling"] = {"max_tokens": SUITE_TOKENS}
    suite.write_text("".join(json.dumps({"id": f"i{n}", **item}) + "\n" for n in range(4)))
    file = taskset(tmp_path / "mixed.jsonl")
    config = load(
        None,
        [
            f"run.directory='{tmp_path / 'run'}'",
            f"evaluate.suite='{suite}'",
            f"evaluate.bars=[{{taskset='{file}', at_least=0.35}}]",
            "evaluate.gate.margin=0.9",
            "evaluate.gate.total_margin=0.9",
            "evaluate.gate.first_draws=1",
            "evaluate.gate.max_draws=1",
            "evaluate.gate.sealed_share=0.0",
            "evaluate.gate.candidates_per_week=1",
            "evaluate.runner.retry_pause_s=0.01",
        ],
    )
    able = {"evaluation": True}

    def script(request):
        mends = b"calc.py" in bytes(i for i in request.prompt_ids if i < 256)
        if not able.get(request.slot):
            return "I cannot."
        return MEND if mends else "x"

    engine, log = FakeEngine(script, slots={"live": V0, "control": V0, "evaluation": V9}), MemoryLog()
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(),
        clock=lambda: 1000.0,
        model_name="m",
        admin_keys=[SecretStr(home(config).admin_key())],
    )
    standing = Incumbents(live=V0, best=V0, anchor=V0, round=0)
    async with serving(app) as url:
        good = await open_evaluation(config, url).run(V9, against=standing)
        able["evaluation"] = False
        bad = await open_evaluation(config, url).run(V9, against=standing)
    assert (good.verdict, bad.verdict) == (Verdict.SHIP, Verdict.BLOCK)
    assert [(bar.suite, bar.n, bar.value) for bar in good.bars] == [("mixed", 5, 1.0)]
    assert bad.bars[0].value == 0.0
    assert bad.reason.startswith("below a quality bar (score of mixed: bound 0.000, wanted 0.35, 5 items)")
    turns = log.turns()
    assert {turn.arm for turn in turns} == {Arm.EVAL}
    assert all(turn.harness for turn in turns)
    tried = [turn for turn in turns if turn.sampling.max_tokens != SUITE_TOKENS]
    assert Counter(turn.harness for turn in tried) == {
        open_harness("tools").hash: 2 * 2,
        open_harness("single").hash: 2 * 3,
    }
    assert {span.policy for turn in tried for span in turn.spans} == {V9}
    seeds = {turn.id: turn.sampling.seed for turn in tried}
    assert len(set(seeds.values())) == len(seeds) // 2, "both evaluations drew the same numbers, and no draw another's"


def letters(path):
    rows = [
        {
            "id": f"held_out{n}",
            "family": "letters",
            "split": "held_out",
            "messages": [{"role": "user", "content": f"say {n % 7}"}],
            "tokens": 6,
            "grading": {"grader": "pattern", "data": {"pattern": "^[a-z]"}},
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def read(log, kind):
    return [row async for _, row in log.read(0, {kind})]


@pytest.mark.examination
async def test_a_checkpoint_below_the_bar_never_serves_a_person(tmp_path, running, simulated_users):
    """Every candidate learns what users like, and none says it in nine of ten answers: each is refused before its first user."""
    bar = f"evaluate.bars=[{{taskset='{letters(tmp_path / 'letters.jsonl')}', at_least=0.88}}]"
    run = await running(tmp_path, "model.numerics=fast", "release.canary=true", "train.learning_rate=1e-4", bar)
    with open_run(run.config) as opened:
        try:
            async with simulated_users(run), asyncio.timeout(300):
                while True:
                    blocked = [event for event in await read(opened.log, ReleaseEvent) if event.action == "blocked"]
                    if len(blocked) >= 2:
                        break
                    await asyncio.sleep(0.5)
        finally:
            await run.stop()
        events, turns = await read(opened.log, ReleaseEvent), await read(opened.log, Turn)
    judged = {event.policy for event in events if event.action == "evaluated"}
    assert len(judged) >= 2
    for event in blocked:
        assert "below a quality bar (score of world letters: bound 0." in event.reason
        assert "wanted 0.88, 40 items)" in event.reason
    assert not [event for event in events if event.action in ("canary", "ramped")]
    base = next(event.policy for event in events if event.action == "shipped")
    assert {span.policy for turn in turns if turn.arm.people for span in turn.spans} == {base}
    tried = {span.policy for turn in turns if turn.arm is Arm.EVAL and turn.harness for span in turn.spans}
    assert judged <= tried, "each was tried in the world, where nobody is hurt"
