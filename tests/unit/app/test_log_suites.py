"""Suites from a log: what is drawn and what never is, that `up` accepts them, that they are not learned from; and overlap with training."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import pytest
from rich.console import Console
from tests.fakes.conversations import assistant, system, talk, user

from ostinato.app.evaluation import check_suite
from ostinato.app.log_suites import SuiteDraw, contamination, draw_suite, held_out_prompts, open_reader, suite_files
from ostinato.app.storage import open_log
from ostinato.app.suites import open_task_suite
from ostinato.app.trainer import open_desk
from ostinato.config import load
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.held_out import HeldOutPrompts, prompt_hash
from ostinato.core.records import Arm, Batch, Consent, Finish, Holdback, PolicyVersion, Purpose, Reward
from ostinato.launch.commands.suite import check_suites, make_suite
from ostinato.reward.runners import Inline
from ostinato.testing.records import a_delivery, a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.worlds.tasks.task import Split

BASE = PolicyVersion(number=0, hash="0" * 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def settings(tmp_path, model):
    return lambda *more: load(None, [f"run.directory='{tmp_path / 'run'}'", f"model.source='{model}'", *more])


@pytest.fixture
def reader(settings):
    return open_reader(settings())


def words(seed: int, count: int = 15) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices(ascii_lowercase, k=6)) for _ in range(count))


def a_prompt(reader, i: int, text: str | None = None, **changes):
    """Turn number i: a question of its own, by one of many users."""
    ids = reader.chat(talk(system("You help."), user(words(i) if text is None else text)))
    made = replace(a_turn(f"t{i}:0", user=f"u{i}", prompt=ids, ended_at=10.0 + i), episode=f"e{i}", text=f"answer {i}")
    return replace(made, **changes)


def rewarded(turn, value: float):
    return Reward(turn=turn.id, value=value, function="f@1", signals=(), at=turn.ended_at + 1.0)


def trained_on(step: int, *turns):
    credits = tuple(tuple(1.0 for _ in turn.sampled_ids) for turn in turns)
    return Batch(step=step, turns=tuple(turn.id for turn in turns), credits=credits, reference=BASE, at=99.0, even=True)


async def drawn(config, reader, *rows, **how):
    with open_log(config) as log:
        await log.append(*rows)
        return await draw_suite(log, config, SuiteDraw(**{"grade": "exact", **how}), reader)


async def test_prompts_are_taken_as_they_were_asked(settings, reader):
    continued = replace(talk(user(words(7)), assistant("def add(a, b):\n    ")), continued=True)
    first, second = a_prompt(reader, 1), a_prompt(reader, 2)
    second = replace(second, prompt_ids=tuple(reader.chat(continued)))
    found = await drawn(settings(), reader, first, second, rewarded(first, 1.0), rewarded(second, 0.5))
    by_turn = {task.about["turn"]: task for task in found.tasks}
    assert [message.text for message in by_turn["t1:0"].messages] == ["You help.", words(1)]
    assert [message.text for message in by_turn["t2:0"].messages] == [words(7), "def add(a, b):\n    "]
    assert {task.split for task in found.tasks} == {Split.HELD_OUT}
    assert {task.about["prompt"] for task in found.tasks} == {prompt_hash(turn.prompt_ids) for turn in (first, second)}
    assert by_turn["t1:0"].family.endswith("-positive")


async def test_what_may_not_be_drawn_never_is(settings, reader):
    config = settings("record.encrypt=user")
    near = " ".join(["another", *words(3, 60).split()])
    turns = {
        "fine": a_prompt(reader, 0),
        "trained": a_prompt(reader, 1),
        "like one trained on": a_prompt(reader, 2, words(1)),
        "first": a_prompt(reader, 3, words(3, 60)),
        "near copy": a_prompt(reader, 4, near),
        "forgotten": a_prompt(reader, 5),
        "aborted": a_prompt(reader, 6, finish=Finish.ABORT),
        "cut": a_prompt(reader, 7, finish=Finish.LENGTH),
        "left": a_prompt(reader, 13, finish=Finish.LEFT),
        "chore": a_prompt(reader, 8, purpose=Purpose.SIDE),
        "secret": a_prompt(reader, 15, secret=True),
        "program": a_prompt(reader, 9, arm=Arm.EVAL),
        "other tenant": a_prompt(reader, 10, tenant="bolt"),
        "rollout": a_prompt(reader, 12, arm=Arm.WORLD),
        "refused": a_prompt(reader, 14, consent=Consent.AGGREGATE),
    }
    with open_log(config) as log:
        await log.append(*turns.values(), *(rewarded(turn, 1.0) for turn in turns.values()))
        await log.append(trained_on(1, turns["trained"]))
        await log.forget("default", "u5")
        found = await draw_suite(log, config, SuiteDraw(grade="exact", tenants=("default",)), reader)
    assert {task.about["turn"] for task in found.tasks} in ({"t0:0", "t3:0"}, {"t0:0", "t4:0"})
    assert found.left_out == {
        "copy": 2,
        "trained on": 1,
        "forgotten": 1,
        "cut short": 3,
        "a chore": 1,
        "no consent": 1,
        "holds a secret": 1,
    }
    assert found.trained == 1


async def test_one_person_gives_a_few_items_and_people_without_names_count_by_session(settings, reader):
    ann = [a_prompt(reader, i, user="ann") for i in range(10)]
    nobody = [a_prompt(reader, 20 + i, user="anonymous") for i in range(4)]
    rows = [*ann, *nobody, *(rewarded(turn, 1.0) for turn in (*ann, *nobody))]
    found = await drawn(settings(), reader, *rows, per_user=2)
    users = [turn for task in found.tasks for turn in (*ann, *nobody) if turn.id == task.about["turn"]]
    assert sum(turn.user == "ann" for turn in users) == 2
    assert sum(turn.user == "anonymous" for turn in users) == 4


async def test_strata_have_their_shares(settings, reader):
    turns = [a_prompt(reader, i, words(i, 5 if i % 2 else 40), tenant="acme" if i % 4 else "bolt") for i in range(120)]
    rewards = [rewarded(turn, 1.0 if i % 3 else -1.0) for i, turn in enumerate(turns)]
    found = await drawn(settings("worlds.graders.any='ostinato.app.log_suites:silent'"), reader, *turns, *rewards,
                        items=40, grade="ostinato.app.log_suites:silent")  # fmt: skip
    by_id = {turn.id: number for number, turn in enumerate(turns)}
    numbers = [by_id[task.about["turn"]] for task in found.tasks]
    assert len(numbers) == len(set(numbers)) == 40
    for of, share in ((2, 1 / 2), (3, 1 / 3), (4, 1 / 4)):
        assert abs(sum(number % of == 0 for number in numbers) - 40 * share) <= 3, of
    again = await drawn(settings("record.namespace=x"), reader, items=40, grade="ostinato.app.log_suites:silent")
    assert [task.id for task in again.tasks] == [task.id for task in found.tasks], "one seed draws one suite"
    other = await drawn(settings(), reader, items=40, grade="ostinato.app.log_suites:silent", seed=1)
    assert [task.id for task in other.tasks] != [task.id for task in found.tasks]


@pytest.mark.parametrize(
    ("grade", "told"),
    [
        ("judge", r"set \[worlds.judge\]"),
        ("best", "choose exact, judge, or your own"),
        ("absent_module:f", "module absent_module cannot be imported"),
        ("math:pattern", "a built-in grader has this name"),
    ],
)
async def test_a_grader_that_is_not_there_is_refused_first(settings, reader, grade, told):
    with pytest.raises(BadConfig, match=told):
        await drawn(settings(), reader, a_prompt(reader, 1), grade=grade)


async def test_a_log_without_a_fit_prompt_says_why(settings, reader):
    turn = a_prompt(reader, 1, prompt_ids=tuple(reader.encode("a plain completion")))
    unliked = a_prompt(reader, 2)
    with pytest.raises(NotFound, match="1 not read back, 1 no answer that was liked"):
        await drawn(settings(), reader, turn, unliked, rewarded(turn, 1.0), rewarded(unliked, -1.0))


# ---------------------------------------------------------------- from the command to the gate and the trainer


async def made(config, file, **how) -> str:
    seen = io.StringIO()
    await make_suite(config, file, SuiteDraw(**how), Console(file=seen, width=200))
    return seen.getvalue()


def printed(told: str, tmp_path) -> Path:
    """The settings that the command prints, as a file."""
    lines = [line[2:] for line in told.splitlines() if line.startswith("  ")]
    (tmp_path / "printed.toml").write_text("\n".join(lines))
    return tmp_path / "printed.toml"


@pytest.mark.parametrize("grade", ["exact", "your_graders:same"])
async def test_up_accepts_what_was_written_under_the_settings_that_are_printed(
    settings, reader, tmp_path, monkeypatch, grade
):
    (tmp_path / "your_graders.py").write_text("def same(task, rollout):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config, file = settings(), tmp_path / "answers.jsonl"
    turns = [a_prompt(reader, i) for i in range(60)]
    with open_log(config) as log:
        await log.append(*turns, *(rewarded(turn, 1.0) for turn in turns))
    told = await made(config, file, items=50, grade=grade)
    assert "50 items in" in told
    assert file.stat().st_mode & 0o777 == 0o600
    named = load(printed(told, tmp_path), [f"run.directory='{tmp_path / 'run'}'"])
    suite = await check_suite(named)
    assert (suite.name, len(suite.items)) == ("answers", 50)
    tasks = open_task_suite(str(file), named).tasks.tasks
    assert {task.about["turn"] for task in tasks} <= {turn.id for turn in turns}
    with pytest.raises(BadConfig, match="is there already"):
        await made(config, file, grade=grade)


async def test_the_trainer_holds_back_what_the_suite_measures_with(settings, reader, tmp_path):
    """The item's own turn, the same question of somebody else, and a later turn of such a conversation; others are learned from."""
    file = tmp_path / "answers.jsonl"
    item = a_prompt(reader, 0)
    again = a_prompt(reader, 1, words(0), user="bob")
    later = a_prompt(reader, 2, prompt_ids=(*again.prompt_ids, *reader.encode("Thanks. And then?")), user="bob")
    others = [a_prompt(reader, 10 + i) for i in range(12)]
    config = settings("reward.coverage.enabled=false", "reward.user_cap=1.0")
    held = {"t0:0", "t1:0", "t2:0"}
    with open_log(config) as log:
        await log.append(item, rewarded(item, 1.0))
        assert "only 1 of 200 items in" in await made(config, file, grade="exact")
        rows = [again, later, *others]
        await log.append(*rows, a_delivery(item, *rows))
        await log.append(*(rewarded(turn, float(i % 3) - 1.0) for i, turn in enumerate(rows)))
        careless = open_desk(config, log, asker=Inline(lambda *_: None, max_abs=9.0))
        await careless.poll()
        assert held <= {turn.id for turn in await careless.turns(0, 12)}, (
            "without the setting they would be learned from"
        )
        named = settings("reward.coverage.enabled=false", "reward.user_cap=1.0", f"evaluate.suite='{file}'")
        batch = await open_desk(named, log, asker=Inline(lambda *_: None, max_abs=9.0)).batch(1, 12, BASE)
        assert batch is not None
        assert set(batch.row.turns) == {turn.id for turn in others}
        assert {row.turn: row.reason for _, row in log.tail(99, {Holdback})} == dict.fromkeys(held, "held_out")


def test_a_prompt_is_covered_from_its_first_token_to_its_last():
    held = HeldOutPrompts([(3, prompt_hash((1, 2, 3))), (2, prompt_hash((7, 8)))])
    assert [held.covers(ids) for ids in ((1, 2, 3), (1, 2, 3, 4), (7, 8, 9, 9))] == [True] * 3
    assert [held.covers(ids) for ids in ((1, 2), (0, 1, 2, 3), (7,), (), (1, 2, 4, 3))] == [False] * 5
    assert not HeldOutPrompts().covers((1, 2, 3))


def test_a_suite_that_is_elsewhere_is_no_reason_not_to_start(settings, tmp_path, caplog):
    assert len(held_out_prompts(settings(f"evaluate.suite='{tmp_path / 'absent.jsonl'}'"))) == 0
    assert "is not on this machine" in caplog.text


async def test_a_tenants_suite_is_not_learned_from_by_the_shared_training_either(settings, reader, tmp_path):
    """A branch begins with what the shared training learned, of this tenant's people, too."""
    file, item = tmp_path / "acme.jsonl", a_prompt(reader, 1)
    with open_log(settings()) as log:
        await log.append(item, rewarded(item, 1.0))
    await made(settings(), file, grade="exact")
    config = settings(f"evaluate.tenant_suites={{acme=['{file}']}}")
    assert suite_files(config) == (str(file),)
    assert held_out_prompts(config).covers(item.prompt_ids)


# ---------------------------------------------------------------- contamination


async def test_planted_overlap_is_found_and_named_and_disjoint_text_is_not(settings, reader, tmp_path):
    config, file = settings(), tmp_path / "answers.jsonl"
    planted, alone, short = words(500, 30), words(501, 30), words(502, 9)
    rows = [("planted", planted), ("alone", alone), ("short", short)]
    file.write_text(
        "".join(
            json.dumps({"id": id, "family": "f", "messages": [{"role": "system", "content": words(1, 40)},
                        {"role": "user", "content": text}], "grader": "pattern", "pattern": "x"}) + "\n"
            for id, text in rows
        )
    )  # fmt: skip
    inside = f"Please: {' '.join(planted.split()[8:22])}, thanks."
    trained = [
        a_prompt(reader, 0, inside),
        a_prompt(reader, 1, words(600, 30)),
        replace(a_prompt(reader, 2), text=f"You said {short}!"),
        a_prompt(reader, 3, inside),
    ]
    untrained = a_prompt(reader, 4, alone)
    twelve = a_prompt(reader, 5, " ".join(alone.split()[:12]))
    with open_log(config) as log:
        await log.append(*trained, untrained, twelve, *(rewarded(turn, 1.0) for turn in (*trained, twelve)))
        await log.append(trained_on(1, *trained, twelve))
        tasks = open_task_suite(str(file), config).tasks.tasks
        found = await contamination(log, {"answers": tasks}, reader)
    assert (found.items, found.turns, found.short) == (3, 5, 0)
    assert [(each.item, each.turns, each.turn) for each in found.shared] == [
        ("answers: planted", 2, "t0:0"),
        ("answers: short", 1, "t2:0"),
    ]
    seen = io.StringIO()
    assert not await check_suites(config, [str(file)], 13, False, Console(file=seen, width=200))
    assert (
        "3 items, 5 turns of people that were trained on: 2 items share 13 words in a row with them" in seen.getvalue()
    )
    assert "answers: planted  in 2 turns, e.g. t0:0: " in seen.getvalue()


async def test_the_words_that_all_prompts_share_are_neither_a_copy_nor_contamination(settings, reader, tmp_path):
    """A product writes its instructions into the user's message. Of two questions in one template, both are items."""
    template = f"{words(900, 40)}\n\n"
    turns = [a_prompt(reader, i, template + words(i, 12)) for i in range(12)]
    trained = [a_prompt(reader, 100 + i, template + words(100 + i, 12)) for i in range(3)]
    same = a_prompt(reader, 200, template + words(100, 12))
    config = settings()
    with open_log(config) as log:
        await log.append(*turns, *trained, same, *(rewarded(turn, 1.0) for turn in (*turns, *trained, same)))
        await log.append(trained_on(1, *trained))
        found = await draw_suite(log, config, SuiteDraw(grade="exact"), reader)
        assert {task.about["turn"] for task in found.tasks} == {turn.id for turn in turns}
        assert found.left_out == {"copy": 1, "trained on": 3}
        assert (await contamination(log, {"answers": found.tasks}, reader)).shared == ()
        await log.append(trained_on(2, turns[4]))
        shared = (await contamination(log, {"answers": found.tasks}, reader)).shared
    (hit,) = shared
    assert (hit.turn, hit.run) == ("t4:0", words(4, 12))


async def test_without_a_suite_there_is_nothing_to_check(settings):
    with open_log(settings()):
        pass
    with pytest.raises(NotFound, match=r"no suite is named in evaluate\.suite"):
        await check_suites(settings(), [], 13, True, Console())
