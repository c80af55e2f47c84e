"""The loop closes, through the real processes: people's reactions change the weights that they are served.

The README's product example runs beside them, as it stands: a newcomer copies it first.
"""

import asyncio
import re
from functools import partial
from pathlib import Path

from tests.deadlines import LEARNING_S
from tests.devices import TORCH
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import home, model_path, open_run
from ostinato.core.clock import wall_clock
from ostinato.core.records import Arm, Signal, Turn
from ostinato.evaluate.acceptance import by_arm
from ostinato.launch.commands.weights import replay
from ostinato.status.observed_run import RunObserver
from ostinato.weights.keep.fsck import verify

README = (Path(__file__).parents[2] / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8321"
TIDY = ("housekeeping.every_s=2", "collect.keep=3", "collect.releases=100", "collect.grace_hours=0.005")
"""What never shipped goes while the trainer publishes, the engine follows and the gate measures: eighteen seconds after it was written.
What was live stays, because steps were measured against it and are taken again below."""
QUICKLY = ("serve.control_share=0.5", "train.learning_rate=6e-3", "learn.publish_every=4")
"""Larger steps, of which every fourth is measured by the gate: people need to see fewer turns and candidates until it shows that live has
learned."""
LIKED = "^[ -~]"
"""What a third of the first model's answers begin with: of what is liked so often, a step learns more than of what is rare."""
RATED = (200, 450, 1_200)
"""Turns of each arm after the third release at which acceptance is compared: live goes on learning, so there is more to see later.
Two 95% intervals of equals lie apart, the right way, in 0.3% of looks. Three looks at sizes fixed beforehand: below 1% in all."""


async def until(condition):
    async with asyncio.timeout(LEARNING_S):
        while not (found := await condition()):
            await asyncio.sleep(0.3)
    return found


async def test_reactions_become_better_weights_that_are_served(tmp_path, running, simulated_users, suite_of):
    suite = suite_of(tmp_path / "liked.jsonl", LIKED)
    run = await running(tmp_path, *TIDY, *QUICKLY, f"evaluate.suite='{suite}'")
    with open_run(run.config) as opened:
        log, observer = opened.log, RunObserver(home(run.config), opened.log)

        async def three_releases():
            return len((await observer.look()).shipped()) >= 3

        async def rated(turns):
            points = by_arm((await observer.look()).between(at, at + LEARNING_S))
            return (
                points if all(arm in points and points[arm].turns >= turns for arm in (Arm.LIVE, Arm.CONTROL)) else {}
            )

        async def tidied():
            kept = [ref for ref in await opened.store.refs() if ref.startswith("version/")]
            return len(kept) < len((await observer.look()).published) - 3

        try:
            async with simulated_users(run, liked=LIKED) as acked:
                await until(three_releases)
                copied = await asyncio.to_thread(run_the_example, run.url)
                at = wall_clock()
                for turns in RATED:
                    points = await until(partial(rated, turns))
                    if points[Arm.LIVE].lower > points[Arm.CONTROL].upper:
                        break
            await until(tidied)
        finally:
            await run.stop()
        seen = await observer.look()
        assert points[Arm.LIVE].lower > points[Arm.CONTROL].upper, points
        assert acked.failures == 0
        assert not [event for event in run.events if "starts again" in event[1]]

        await the_example_was_heard(log, copied["reply"].id)
        found = await recount(log)
        assert found.balanced, found
        assert found.held["arm:control"] > 0
        assert found.held["arm:eval"] > 0

        roots = await replay(opened, model_path(run.config))
        published = {line["number"]: line["hash"] for line in seen.published}
        assert roots
        if TORCH.device == "cpu":
            assert {step: root for step, root in roots.items() if step in published} == published
        else:  # where nobody promises that a step taken again gives the same bits
            assert published.keys() <= roots.keys()
            roots = published
        kept = [ref for ref in await opened.store.refs() if ref.startswith("version/")]
        assert len(kept) < len(roots) - 3, "what nothing needs was deleted meanwhile"
        assert "deleted" in (home(run.config).root / "logs" / "housekeeping.log").read_text()
        assert (await verify(opened.store)).problems == []
        live = await opened.follower.resolve("live")
        assert live is not None
        assert live.hash == roots[live.number], "what is served is what was trained"
        served = {span.policy for turn, _ in seen.rated for span in turn.spans}
        assert {policy.hash for policy in served if policy.number} <= set(roots.values())
        assert max(policy.number for policy in served) > 0, "people were served what was learned"


def run_the_example(url: str) -> dict:
    """Run the README's example against this gateway. Returns its names."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert ADDRESS in example
    names: dict = {}
    exec(example.replace(ADDRESS, url), names)
    names["signals"].close()
    return names


async def the_example_was_heard(log, reply: str) -> None:
    rows = [row async for _, row in log.read(0, {Turn, Signal})]
    people = [row.id for row in rows if isinstance(row, Turn) and row.user == "u42"]
    said = [(row.turn, row.name, row.value) for row in rows if isinstance(row, Signal) and row.turn in people]
    assert people == [f"{reply}:0"]
    assert said == [(people[0], "accepted", 1.0)]
