"""Which task is next, how far ahead may be worked, and how verdicts are laid out."""

import itertools
import math

import numpy as np
import pytest

from ostinato.core.verdicts import CLOSED, FAILED, GRADED
from ostinato.reward.credit import relative
from ostinato.worlds.rollout.groups import (
    GroupMember,
    Groups,
    RolloutGroup,
    RolloutOutcome,
    Success,
    next_task,
    shuffled,
    verdicts,
)

TASKS = [f"t{n}" for n in range(7)]


def drawn(groups: Groups, count: int) -> list[str]:
    found = []
    for _ in range(count):
        event = groups.draw(2)
        if event is None:
            break
        groups.apply(event)
        found.append(event["task"])
    return found


def grade(groups: Groups, task: str, *grades: float) -> None:
    """Rollouts of a task, as the journal would tell them."""
    event = {"kind": "drawn", "n": groups.drawn, "task": task, "epoch": groups.epoch, "size": len(grades)}
    groups.apply(event)
    for member, value in enumerate(grades):
        tail = {"n": event["n"], "member": member, "episode": f"e{member}"}
        groups.apply({"kind": "begun", **tail})
        groups.apply({"kind": "ended", **tail, "turns": [f"{event['n']}.{member}:0"], "grade": value, "last": True})


def test_each_task_comes_once_an_epoch_in_an_order_of_its_own():
    groups = Groups(TASKS, token="w", seed=1, epochs=2)
    first, second = drawn(groups, 7), drawn(groups, 7)
    assert sorted(first) == sorted(second) == TASKS
    assert first != second
    assert groups.draw(2) is None, "no prompt is repeated more often than asked for"


def test_the_order_is_the_seeds_and_not_the_files():
    assert shuffled(TASKS, 0, 3) == shuffled(TASKS[::-1], 0, 3)
    assert shuffled(TASKS, 0, 3) != shuffled(TASKS, 0, 4)


def test_without_an_end_it_goes_on():
    assert len(drawn(Groups(TASKS, token="w", epochs=0), 70)) == 70


@pytest.mark.parametrize(
    ("rollouts", "grades", "teaches"),
    [
        (0, 0.0, True),
        (10, 1.0, True),
        (10, 9.0, True),
        (16, 1.0, False),
        (16, 15.0, False),
        (8, 0.0, False),
        (8, 8.0, False),
    ],
)
def test_what_is_always_or_never_solved_teaches_little(rollouts: int, grades: float, teaches: bool):
    assert Success(rollouts=rollouts, grades=grades).teaches is teaches


def test_the_curriculum_puts_what_teaches_first_and_leaves_nothing_out():
    known = {"a": Success(rollouts=16, grades=16.0), "b": Success(rollouts=16, grades=8.0), "c": Success(rollouts=4)}
    assert next_task(["a", "b", "c", "d"], known, curriculum=True) == "b"
    assert next_task(["a", "c", "d"], known, curriculum=True) == "d"
    assert next_task(["a", "c"], known, curriculum=True) == "a"
    assert next_task(["a", "b"], known, curriculum=False) == "a"


def test_the_curriculum_learns_of_earlier_epochs():
    groups = Groups(["easy", "mixed"], token="w", epochs=0)
    drawn(groups, 2)
    grade(groups, "easy", *[1.0] * 8)
    grade(groups, "mixed", 1.0, 0.0)
    assert all(drawn(groups, 2) == ["mixed", "easy"] for _ in range(4))


# ---------------------------------------------------------------- window and lead


def test_nothing_begins_beyond_the_window_of_the_oldest_that_has_not_ended():
    groups = Groups(TASKS, token="w", epochs=0)
    drawn(groups, 4)
    pace = {"per_step": 100, "lead": 1}
    assert not groups.may_begin(window=4, **pace)
    groups.apply({"kind": "told", "n": 2})
    assert not groups.may_begin(window=4, **pace), "the head is waited for, whatever else has ended"
    groups.apply({"kind": "told", "n": 0})
    assert groups.may_begin(window=4, **pace)
    drawn(groups, 1)
    assert not groups.may_begin(window=4, **pace)


def told(groups: Groups, number: int, *grades: float) -> None:
    """All members of a group end with these grades, and it is told."""
    for member, grade in enumerate(grades):
        tail = {"n": number, "member": member, "episode": f"w.{number}.{member}.0", "turns": ["t"], "last": True}
        groups.apply({"kind": "ended", **tail, "grade": grade})
    groups.apply({"kind": "told", "n": number})


def test_nothing_begins_too_far_ahead_of_the_trainer():
    groups = Groups(TASKS, token="w", epochs=0)
    drawn(groups, 6)
    for number in range(6):
        told(groups, number, 0.0, 1.0)
    assert not groups.may_begin(per_step=3, lead=2, window=99)
    groups.apply({"kind": "spent", "n": 0})
    assert groups.may_begin(per_step=3, lead=2, window=99)


@pytest.mark.parametrize("flat_count", [False, True])
def test_a_group_that_teaches_nothing_is_not_waited_for_unless_the_trainer_takes_it(flat_count: bool):
    groups = Groups(TASKS, token="w", epochs=0, flat_count=flat_count)
    drawn(groups, 6)
    told(groups, 0, 1.0, 1.0)
    for number in range(1, 6):
        told(groups, number, 0.0, 1.0)
    assert groups.may_begin(per_step=3, lead=2, window=99) is not flat_count


@pytest.mark.parametrize("window", [1, 4, 100])
def test_the_window_bounds_how_much_the_quick_ones_get_ahead(window: int):
    """Every fifth group takes 50 times as long; at any time, no group is told while one `window` older is not."""
    groups, told, open_until = Groups(TASKS, token="w", epochs=0), [], {}
    for now in itertools.count():
        while groups.may_begin(per_step=1000, lead=1, window=window):
            number = groups.drawn
            drawn(groups, 1)
            open_until[number] = now + (50 if number % 5 == 0 else 1)
        for number in [number for number, end in open_until.items() if end <= now]:
            del open_until[number]
            groups.apply({"kind": "told", "n": number})
            groups.apply({"kind": "spent", "n": number})
            told.append(number)
            assert all(number < other + window for other in open_until)
        if len(told) > 200:
            break
    share = sum(number % 5 == 0 for number in told[:100]) / 100
    assert abs(share - 0.2) <= window / 100


# ---------------------------------------------------------------- verdicts


def ended(turns: list[tuple[int, float | None]]):
    """A group of which each member has so many turns and a grade."""
    groups = Groups(["t"], token="w")
    groups.apply({"kind": "drawn", "n": 0, "task": "t", "epoch": 0, "size": len(turns)})
    for member, (count, value) in enumerate(turns):
        names = [f"m{member}-{n}:0" for n in range(count)]
        tail = {"n": 0, "member": member, "episode": f"w.0.{member}.0"}
        groups.apply({"kind": "ended", **tail, "turns": names, "grade": value, "last": True})
    return groups.open[0]


def test_the_last_turn_has_the_grade_and_the_group_is_closed_with_a_graded_turn():
    (call,) = verdicts(ended([(2, 0.5), (1, None), (1, 0.0)]))
    assert [(event["target"], event["name"], event["value"]) for event in call] == [
        ("m1-0:0", FAILED, 1.0),
        ("m0-0:0", GRADED, 0.0),
        ("m0-1:0", GRADED, 0.5),
        ("m2-0:0", GRADED, 0.0),
        ("m2-0:0", CLOSED, 2.0),
    ]
    assert len({event["id"] for event in call}) == len(call)


def test_long_groups_take_several_calls_and_close_in_the_last():
    group = ended([(3, 1.0)] * 5)
    calls = verdicts(group, most=4)
    assert [len(call) for call in calls] == [3, 3, 3, 3, 4]
    assert [event["name"] for call in calls for event in call].count(CLOSED) == 1
    assert calls[-1][-1]["target"] in {event["target"] for event in calls[-1][:-1]}
    assert verdicts(group, most=4) == calls, "whoever tells it again tells the same"


def test_a_group_that_nobody_answered_is_not_told():
    assert verdicts(ended([(0, None)])) == []


# ---------------------------------------------------------------- the first rollouts of a group


def group_of(grades, begun: int) -> RolloutGroup:
    """A group of as many rollouts as there are grades, of which so many have ended."""
    ended = [RolloutOutcome(episode=f"e{n}", turns=(f"t{n}",), grade=grade) for n, grade in enumerate(grades)]
    slots = [GroupMember(begun=int(n < begun), last=each if n < begun else None) for n, each in enumerate(ended)]
    return RolloutGroup(number=0, name="g.0", task="t", slots=slots)


def credited(grades, first: int) -> list[float]:
    """The advantages of the rollouts that are made of these."""
    made = grades[:first] if group_of(grades, first).settled(first) else grades
    return relative(list(made))


def test_the_first_rollouts_settle_a_group_only_if_they_are_alike_and_alone():
    assert group_of([1.0, 1.0, 0.0, 0.0], 2).settled(2)
    assert not group_of([1.0, 0.0, 0.0, 0.0], 2).settled(2)
    assert not group_of([1.0, 1.0, 0.0, 0.0], 3).settled(2), "a third has begun"
    assert not group_of([1.0, 1.0], 2).settled(2), "there are no others"
    assert not group_of([1.0, None, 1.0, 1.0], 2).settled(2), "one tells nothing of the others"
    assert group_of([1.0, None, 1.0, 1.0], 3).settled(3)
    assert not group_of([1.0, 1.0], 0).settled(0)


@pytest.mark.parametrize(("grades", "exact"), [((1.0, 0.0, 0.0), True), ((1.0, 0.25, 0.0), False)])
def test_within_a_task_the_expected_gradient_keeps_its_direction_if_grades_have_two_values(grades, exact: bool):
    """All groups of four over three answers, each weighed with its probability; the first two may settle it."""
    p = np.array([0.15, 0.35, 0.5])
    scores = np.eye(3) - p  # row a: d log p(a) / d logits
    wanted = (p * grades) @ scores
    found = np.zeros(3)
    for answers in itertools.product(range(3), repeat=4):
        advantages = credited([grades[a] for a in answers], 2)
        found += math.prod(p[list(answers)]) * sum(
            a * scores[answer] for a, answer in zip(advantages, answers, strict=False)
        )
    cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
    assert bool(abs(cosine - 1) < 1e-12) is exact
    assert cosine > 0.99


def test_more_is_learned_from_as_many_rollouts():
    """Tasks whose share solved spreads as Beta(0.5, 2), with mean 0.2: the squared advantages per rollout, over all outcomes of sixteen."""
    chances = np.linspace(0.0005, 0.9995, 1000)
    weights = chances**-0.5 * (1 - chances)
    learned, made = {0: 0.0, 4: 0.0}, {0: 0.0, 4: 0.0}
    for early, late in itertools.product(range(5), range(13)):
        grades = [1.0] * early + [0.0] * (4 - early) + [1.0] * late + [0.0] * (12 - late)
        solved = early + late
        share = math.comb(4, early) * math.comb(12, late) * chances**solved * (1 - chances) ** (16 - solved)
        for first in learned:
            advantages = credited(grades, first)
            learned[first] += float((share * weights).sum()) * sum(a * a for a in advantages)
            made[first] += float((share * weights).sum()) * len(advantages)
    gain = (learned[4] / made[4]) / (learned[0] / made[0])
    assert 1.2 < gain < 1.35
    assert made[4] < 0.65 * made[0]
