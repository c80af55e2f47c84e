"""The suite runner through the real gateway and a real socket: versions, slots and arms as people's requests have them."""

import json

import pytest
from pydantic import SecretStr

from ostinato.core.errors import Unauthorized, Unavailable
from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.report import Incumbents
from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.evaluation import Evaluation
from ostinato.evaluate.runner import RunnerConfig, SuiteRunner
from ostinato.evaluate.suites import parse
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

KEY = "an-admin-key-0123456789"
V0, V7, V9 = (PolicyVersion(number=n, hash=h) for n, h in ((0, "00"), (7, "aa"), (9, "bb")))
SUITE = parse(
    "held-out",
    "\n".join(
        json.dumps(
            {
                "id": f"i{i}",
                "family": "f",
                "messages": [{"role": "user", "content": f"task {i}"}, {"role": "assistant", "content": "def"}],
                "continue_final_message": i % 2 == 0,
                "sampling": {"max_tokens": 32, "stop": ["\n"]},
                "grader": "right",
            }
        ).replace(
            ', {"role": "assistant", "content": "def"}', "" if i % 2 else ', {"role": "assistant", "content": "def"}'
        )
        for i in range(40)
    ),
)


async def right(item, text):
    return float(text == "right")


def script(request):
    return "right" if request.slot == "candidate" or request.sampling.seed % 3 == 0 else "wrong"


async def test_candidate_against_live_through_the_gateway():
    engine = FakeEngine(script, slots={"live": V7, "candidate": V9, "control": V0})
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
        config = RunnerConfig(retry_pause_s=0.01, slot_timeout_s=0.1)
        runner = SuiteRunner(SUITE, right, url, KEY, config)
        standing = Incumbents(live=V7, best=V0, anchor=V0, round=0)
        gate = GateConfig(first_draws=2, max_draws=2, sealed_share=0.0)
        report = await Evaluation([runner], gate).run(V9, against=standing)
        with pytest.raises(Unauthorized, match="admin key"):
            await SuiteRunner(SUITE, right, url, "another-key-0123456789", config).run("live", V7, range(1))
        with pytest.raises(Unavailable, match="serve v11@cc; it serves v9@bb"):
            await runner.run("candidate", PolicyVersion(number=11, hash="cc"), range(1))
        with pytest.raises(Unavailable, match="slot 'canary' to serve v9@bb; it is not loaded"):
            await runner.run("canary", V9, range(1))
    assert (report.candidate_mean, report.items, report.draws) == (1.0, 40, 2)
    assert 0.1 < report.live_mean < 0.6
    turns = log.turns()
    assert len(turns) == 3 * 2 * 40
    assert {turn.arm for turn in turns} == {Arm.EVAL}
    assert {turn.user for turn in turns} == {"eval"}
    seeds = {
        slot: sorted(r.sampling.seed for r in engine.requests if r.slot == slot)
        for slot in ("live", "candidate", "control")
    }
    assert seeds["live"] == seeds["candidate"] == seeds["control"]
