"""Tab's lines: the same everywhere, held-out ones typed by nobody, chance that no suggestion can beat, silence recognised."""

import json
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from ostinato.core.conversation import Message, Role
from ostinato.demo.tab import (
    FAMILIES,
    HELD_OUT,
    LINES,
    NOTHING,
    STOP,
    Line,
    T,
    is_meant,
    make_typists,
    split_lines,
    suite_items,
)
from ostinato.demo.users import UsersConfig
from ostinato.worlds.grading.grade import SuggestionGrader
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.tasksets import parse

USERS, HELD = split_lines()


def test_lines_come_from_nothing_but_their_family():
    assert split_lines() == (USERS, HELD)
    assert len(HELD) == HELD_OUT * len(FAMILIES)
    assert len(USERS) + len(HELD) == LINES * len(FAMILIES)
    assert len({line.id for line in USERS + HELD}) == len(USERS + HELD)
    assert not {line.start for line in USERS} & {line.start for line in HELD}


def test_what_is_meant_ends_where_an_answer_ends():
    for line in USERS + HELD:
        assert line.start.endswith(",")
        for item in line.meant:
            assert item == item.strip()
            assert not any(stop in item for stop in STOP)
            assert item != NOTHING


@pytest.mark.parametrize(
    ("start", "meant"),
    [
        ("days: Saturday, Sunday,", "Monday"),
        ("count: 8, 9, 10, 11, 12,", "13"),
        ("letters: v, w, x, y, z,", "a"),
        ("months: November, December,", "January"),
    ],
)
def test_certain_lines_go_on_as_anybody_would(start, meant):
    family, _, rest = start.partition(": ")
    for line in USERS + HELD:
        if line.family == family and line.start == start:
            assert line.meant == (meant,)
    items = rest.strip(",").split(", ")
    draw = FAMILIES[family]
    for seed in range(20_000):
        found, answers = draw(random.Random(seed))
        if found == items:
            assert list(answers) == [meant]
            return
    pytest.fail(f"{start} is never drawn")


def test_chance_is_beaten_by_no_suggestion():
    line = next(line for line in USERS if line.family == "dice")
    dice = random.Random(0)
    for guess in "123456":
        hits = sum(is_meant(line, f" {guess}", dice) for _ in range(3000)) / 3000
        assert abs(hits - 1 / 6) < 4 * (5 / 36 / 3000) ** 0.5
    assert len(line.meant) > 1 / T  # so that silence pays


def test_families_lie_on_both_sides_of_the_threshold():
    best = {line.family: 1 / len(line.meant) for line in USERS}
    assert sum(p < T for p in best.values()) >= 3
    assert sum(p > T for p in best.values()) >= 6
    assert T not in best.values()


@pytest.mark.parametrize(
    ("text", "shown"), [("-", False), (" -", False), ("", False), (" ", False), (" Monday", True), (" -3", True)]
)
def test_silence_is_recognised(text, shown):
    assert Line(id="a/0", family="a", start="a: b,", meant=("c",)).shows(text) is shown


def test_the_suite_means_every_chance_as_often():
    items = suite_items(HELD)
    assert [item["id"] for item in items] == [line.id for line in HELD]
    meant = defaultdict(Counter)
    for item, line in zip(items, HELD, strict=True):
        assert item["meant"] in line.meant
        meant[line.family][item["meant"]] += 1
    assert set(meant["coin"].values()) == {HELD_OUT // 2}
    assert set(meant["dice"].values()) == {HELD_OUT // 6}


async def test_the_suite_s_score_is_the_reward_plus_t():
    (task,) = parse("tab", json.dumps(suite_items(HELD)[0]), Path()).tasks
    scores: list[float] = []
    for text in (f" {task.grading.data['meant']}", " surely not", " -", ""):
        said = (*task.messages, Message(role=Role.ASSISTANT, text=text))
        rollout = Rollout(task=task.id, harness="single@h", ended=Ended.SUBMITTED, messages=said, turns=("c:0",))
        scores.append((await SuggestionGrader().grade(task, rollout)).value)
    assert [score - T for score in scores] == [1 - T, -T, 0.0, 0.0]


def test_typists_come_from_the_seed_and_type_everything():
    typists = make_typists(USERS, UsersConfig(count=60), 3)
    assert typists == make_typists(USERS, UsersConfig(count=60), 3)
    assert typists != make_typists(USERS, UsersConfig(count=60), 4)
    assert len({user.id for user in typists}) == 60
    assert all(sorted(user.families) == sorted(FAMILIES) for user in typists)
    assert len({user.families for user in typists}) == 60
