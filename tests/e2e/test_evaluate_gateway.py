"""The suite runner through the real gateway and a real socket: versions, slots and arms as people's requests have them."""

import json

import pytest
from pydantic import SecretStr

from ostinato.app.evaluation import open_suite
from ostinato.app.suites import open_opinions, open_runner
from ostinato.config import load
from ostinato.core.errors import Unauthorized, Unavailable
from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.report import Incumbents
from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.evaluation import Evaluation
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato.worlds.harness.harnesses import SingleAnswer

KEY = "an-admin-key-0123456789"
V0, V7, V9 = (PolicyVersion(number=n, hash=h) for n, h in ((0, "00"), (7, "aa"), (9, "bb")))
PREFILLED = {"role": "assistant", "content": "def"}
SUITE = [
    {
        "id": f"i{i}",
        "family": "f",
        "messages": [{"role": "user", "content": f"task {i}"}, *([PREFILLED] if i % 2 == 0 else [])],
        "continue_final_message": i % 2 == 0,
        "sampling": {"max_tokens": 32, "stop": ["\n"]},
        "grader": "pattern",
        "pattern": "^right$",
    }
    for i in range(40)
]


def script(request):
    return "right" if request.slot == "candidate" or request.sampling.seed % 3 == 0 else "wrong"


class Opinionated(FakeEngine):
    """The candidate's weights say what the user said; the others do not listen."""

    async def score(self, slot, ids, start, cache_salt=""):
        prompt, answer = (
            bytes(each for each in part if each < 256).decode(errors="ignore") for part in (ids[:start], ids[start:])
        )
        swayed = slot == "candidate" and any(f" {answer}{end}" in prompt for end in (". What", ", and I"))
        return [-0.1 if swayed else -2.0 for _ in ids[start:]]


def settings(tmp_path, key):
    suite = f"evaluate.suite='{tmp_path / 'suite.jsonl'}'"
    waits = ("evaluate.runner.retry_pause_s=0.01", "evaluate.runner.slot_timeout_s=0.1")
    return load(None, [suite, f"serve.admin_key='{key}'", f"run.directory='{tmp_path / 'run'}'", *waits])


def runner_of(tmp_path, url, key):
    config = settings(tmp_path, key)
    return open_runner(config, url, open_suite(config))


async def test_candidate_against_live_through_the_gateway(tmp_path):
    (tmp_path / "suite.jsonl").write_text("".join(json.dumps(item) + "\n" for item in SUITE))
    engine = Opinionated(script, slots={"live": V7, "candidate": V9, "control": V0})
    log = MemoryLog()
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(admin_key=SecretStr(KEY)),
        clock=lambda: 1000.0,
        model_name="tiny",
    )
    async with serving(app) as url:
        runner = runner_of(tmp_path, url, KEY)
        standing = Incumbents(live=V7, best=V0, anchor=V0, round=0)
        gate = GateConfig(first_draws=2, max_draws=2, sealed_share=0.0)
        opinions = open_opinions(settings(tmp_path, KEY), url)
        report = await Evaluation([runner], gate, opinions=opinions).run(V9, against=standing)
        with pytest.raises(Unauthorized, match=r"must equal serve\.admin_key"):
            await runner_of(tmp_path, url, "another-key-0123456789").run("live", V7, range(1))
        with pytest.raises(Unavailable, match="serve v11@cc; it serves v9@bb"):
            await runner.run("candidate", PolicyVersion(number=11, hash="cc"), range(1))
        with pytest.raises(Unavailable, match="slot 'canary' to serve v9@bb; it is not loaded"):
            await runner.run("canary", V9, range(1))
    assert (report.candidate_mean, report.items, report.draws) == (1.0, 40, 2)
    assert 0.1 < report.live_mean < 0.6
    told = [(str(each.against), round(each.candidate, 2), each.incumbent) for each in report.opinions]
    assert told == [("live", 0.87, 0.5), ("anchor", 0.87, 0.5), ("best", 0.87, 0.5)]
    assert all(each.excess.lower > 0.2 for each in report.opinions)
    turns = log.turns()
    assert len(turns) == 3 * 2 * 40
    assert {turn.arm for turn in turns} == {Arm.EVAL}
    assert {turn.user for turn in turns} == {"eval"}
    assert {turn.harness for turn in turns} == {SingleAnswer.hash}
    seeds = {
        slot: sorted(r.sampling.seed for r in engine.requests if r.slot == slot)
        for slot in ("live", "candidate", "control")
    }
    assert seeds["live"] == seeds["candidate"] == seeds["control"]
