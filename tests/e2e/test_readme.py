"""The README's product example is run as it stands, against a run of `up`'s workers: a newcomer copies it first."""

import asyncio
import re
from pathlib import Path

from ostinato.app.storage import open_log
from ostinato.core.records import Signal, Turn

README = (Path(__file__).parents[2] / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8321"


async def test_the_products_example_runs_as_it_stands(tmp_path, running):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert ADDRESS in example
    run = await running(tmp_path, "model.numerics=fast")
    try:
        names: dict[str, object] = {}
        await asyncio.to_thread(exec, example.replace(ADDRESS, run.url), names)
        with open_log(run.config) as log:
            rows = [row async for _, row in log.read(0, {Turn, Signal})]
        people = [row for row in rows if isinstance(row, Turn) and row.user == "u42"]
        said = [row for row in rows if isinstance(row, Signal)]
        assert [turn.id for turn in people] == [f"{names['reply'].id}:0"]
        assert [(signal.turn, signal.name, signal.value) for signal in said] == [(people[0].id, "accepted", 1.0)]
        names["signals"].close()
    finally:
        await run.stop()


def test_feedback_within_the_hour_counts():
    """What the README says of the time that people have is the default."""
    from ostinato.core.records import Pending, Reward
    from ostinato.reward.functions import copilot
    from ostinato.testing.records import a_signal, a_turn

    assert "within the hour" in README
    turn = a_turn("a:0", ended_at=10.0)
    late = [a_signal(turn, "accepted", at=10.0 + 3599.0)]
    assert copilot(turn, late, 10.0 + 3599.0) == Pending(until=3610.0)
    assert copilot(turn, late, 3610.0).value > 0
    assert isinstance(copilot(turn, [a_signal(turn, "accepted", at=10.0 + 3601.0)], 3700.0), Reward)
    assert copilot(turn, [a_signal(turn, "accepted", at=10.0 + 3601.0)], 3700.0).value == 0
