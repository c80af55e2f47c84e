"""`ostinato doctor` says when the model's context is too small for the prompts of the run's sessions."""

import asyncio
from dataclasses import replace

import pytest

from ostinato.app.storage import open_folds
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.records import Purpose, Window, WindowMaker
from ostinato.launch.commands.doctor import CHECKS
from ostinato.status.summary import Summary, keep
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model

look = dict(CHECKS)["context"]


def said(id, tokens, *, begins=None, purpose=Purpose.TASK):
    window = None if begins is None else Window(number=1, begins_with=begins, by=WindowMaker.AGENT)
    return replace(a_turn(id, prompt=range(tokens)), episode="e", purpose=purpose, window=window)


@pytest.fixture
def told(tmp_path):
    model = tiny_model(tmp_path / "model", layers=1, context=4096)
    config = load(None, [f"model.source='{model}'", f"run.directory='{tmp_path / 'run'}'"])

    async def tell(*turns):
        seen = Summary()
        for cursor, turn in enumerate(turns, start=1):
            seen.apply(cursor, turn)
        folds = open_folds(config)
        await keep(seen, folds)

    return config, tell


def test_a_run_without_long_prompts_has_its_context_told(told):
    assert look(told[0]) == "4,096 tokens; no prompt of 1,000 tokens was served yet"


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (
            [said("a:0", 1_500), said("b:0", 3_000)],
            "4,096 tokens; the newest 1 long sessions had prompts of up to 3,000, and windows begin with up to 1,500",
        ),
        ([said("a:0", 2_815)], "windows begin with up to 2,815"),
        ([said("a:0", 2_816)], "warning: 1 of them began a window with 2,816 tokens and more"),
        (
            [said("a:0", 1_500), said("s:0", 2_700, purpose=Purpose.COMPACTION), said("b:0", 2_900, begins="s:0")],
            "with a summary of up to 256 they reach 3,072 (serve.compaction_share) again at once",
        ),
    ],
    ids=["fits", "fits barely", "tools alone", "tools and a summary"],
)
def test_a_context_that_tools_and_a_summary_fill_is_told_with_the_remedy(told, turns, words):
    asyncio.run(told[1](*turns))
    found = look(told[0])
    assert words in found
    assert ("Serve a model with a longer context" in found) == ("warning" in found or "they reach" in words)


def test_prompts_that_the_model_would_refuse_fail_the_check(told):
    asyncio.run(told[1](said("a:0", 9_000)))
    with pytest.raises(
        BadConfig, match=r"prompts of up to 9,000: such calls are refused\. Serve a model with a longer context"
    ):
        look(told[0])
