"""`ostinato reward try` over the log of a run: what it shows, what it keeps to itself, and that it only reads."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from ostinato.app.storage import open_log
from ostinato.config import load
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.records import Reward
from ostinato.launch.commands.reward import try_reward
from ostinato.testing.records import a_delivery, a_signal, a_turn

YOURS = """
import os
from ostinato.core.records import Reward

def strict(turn, signals, now, *, undone: float = -1.0):
    if turn.user == "broken":
        raise KeyError("colour [red]")
    names = {signal.name for signal in signals}
    value = undone if "undone" in names else 1.0 if "accepted" in names else 0.0
    return Reward(turn=turn.id, value=value, function="strict@1", signals=tuple(s.id for s in signals), at=now)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "yours.py").write_text(YOURS)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *more: load(None, [f"run.directory={tmp_path / 'run'}", *more])


async def filled(config, people=("ann", "bob", "cat", "broken")):
    with open_log(config) as log:
        for i, user in enumerate(people):
            turn = replace(a_turn(f"t{i}:0", user=user), episode=f"e{i}", text=f"[bold]secret of {user}\x1b[2J")
            await log.append(turn, a_signal(turn, "undone" if i % 2 else "accepted", at=10.2), a_delivery(turn))
        value = Reward(turn="t1:0", value=0.75, function="copilot@1", signals=(), at=40.0)
        return await log.append(value)


async def tried(config, function="yours:strict", options=(), **more):
    seen = io.StringIO()
    settings = {"since": None, "limit": 0, "examples": 3, "text": False, "machine": False, **more}
    await try_reward(config, function, options, **settings, console=Console(file=seen, width=160))
    return seen.getvalue()


async def test_it_shows_both_functions_and_writes_nothing(run):
    config = run()
    newest = await filled(config)
    with open_log(config):  # as a run's worker has it
        told = await tried(config)
    assert "4 turns of people, 4 of which may be learned from" in told
    assert "in use: 1 rewards and reasons as recorded, 3 asked for now" in told
    assert "yours:strict failed on 1, e.g. t3:0: reward_failed: KeyError: 'colour [red]'" in told
    assert "t1:0  bob  +0.750 -> -1.000  undone=1" in told, "the recorded reward, not what the function would give now"
    assert "on the 3 turns that both reward" in told
    assert "1 change sign, 0 gain a reward, 1 lose theirs" in told
    assert "secret" not in told
    with open_log(config) as log:
        assert log.tail(1, {Reward})[0][0] == newest
        assert [row.turn for _, row in log.tail(9, {Reward})] == ["t1:0"]


async def test_json_has_the_same_and_is_finite(run):
    config = run()
    await filled(config)
    found = json.loads(await tried(config, options=["undone=-0.5"], machine=True, text=True))
    assert found["new"]["values"] == [-0.5, 1.0, 1.0]
    assert found["new"]["failed"] == [
        {"reason": "reward_failed: KeyError: 'colour [red]'", "turns": 1, "example": "t3:0"}
    ]
    assert found["examples"][0] == {"turn": "t1:0", "who": "bob", "signals": ["undone=1"], "old": 0.75, "new": -0.5}
    assert found["texts"]["t1:0"].startswith("[bold]secret of bob")


async def test_text_is_shown_on_demand_and_cannot_speak_to_the_terminal(run):
    config = run()
    await filled(config)
    told = await tried(config, text=True)
    assert "[bold]secret of bob\\x1b[2J" in told


async def test_users_of_an_encrypted_log_have_no_names_and_the_forgotten_no_words(run):
    config = run("record.encrypt=user")
    await filled(config)
    with open_log(config) as log:
        await log.forget("default", "bob")
    told = await tried(config, text=True)
    assert "user " in told
    assert not {"bob", "cat"} & set(told.replace("/", " ").split())
    assert "secret of bob" not in told
    assert "secret of ann" in told or "secret of cat" in told


async def test_the_function_in_use_keeps_its_options_and_repeats_itself(run):
    config = run("reward.function=yours:strict", "reward.options={undone=-2.0}")
    await filled(config)
    found = json.loads(await tried(config, "", machine=True))
    assert found["new"]["values"] == [-2.0, 1.0, 1.0]
    assert found["old"]["values"] == [0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        ("nowhere:f", (), "module nowhere cannot be imported"),
        ("yours:strickt", (), "did you mean strict"),
        ("yours", (), "must have the form 'module:function'"),
        ("yours:strict", ("undone",), "write it as name=value"),
        ("yours:strict", ("window=3",), "has no such option"),
        ("yours:strict", ("undone=much",), "does not suit yours:strict"),
    ],
)
async def test_a_wrong_call_is_explained(run, function, options, told):
    config = run()
    await filled(config)
    with pytest.raises(BadConfig, match=told):
        await tried(config, function, options)


async def test_no_run_and_no_turns_are_told_apart(run):
    with pytest.raises(NotFound, match="start one with `ostinato up`"):
        await tried(run())
    with open_log(run()):
        pass
    with pytest.raises(NotFound, match="has no turn of people; ask people first"):
        await tried(run())
    await filled(run())
    with pytest.raises(NotFound, match=r"in the last 7 days; raise --since"):
        await tried(run(), since=604_800.0)


async def test_on_eighty_columns_no_figure_and_no_name_is_cut(run):
    config = run()
    await filled(config)
    seen, terminal = io.StringIO(), {"since": None, "limit": 0, "examples": 0, "text": False, "machine": False}
    await try_reward(config, "yours:strict", ["undone=-0.5"], **terminal, console=Console(file=seen, width=80))
    told = seen.getvalue()
    assert "…" not in told
    assert "█" in told
    assert "".join(told.split()).count("ostinato.reward.functions:co") == 1
    assert "tenants with the largest change" not in told, "there is one"
