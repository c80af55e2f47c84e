"""What the terminal and the report say of suggestions: both shares per arm, users as clusters, over the right turns."""

import pytest
from rich.console import Console

from ostinato.core.records import Arm, Reward
from ostinato.core.report import ItemScore
from ostinato.evaluate.suites import Item
from ostinato.launch.commands.scenarios import arm_summary, calibrated, recent_suggestions, share_curves, side_rows
from ostinato.status.observed_run import Observed
from ostinato.testing.records import a_turn

T = 0.25
START, END = 1_000.0, 1_900.0


def observed(*groups):
    """(arm, users, from, to, accepted, rejected, silent) per group: each user's turns are spread over the time."""
    seen = Observed()
    for number, (arm, users, low, high, *outcomes) in enumerate(groups):
        values = [0.75] * outcomes[0] + [-0.25] * outcomes[1] + [0.0] * outcomes[2]
        for user in range(users):
            for index, value in enumerate(values):
                at = low + (high - low) * (index + 0.5) / len(values)
                turn = a_turn(
                    f"{number}-{user}-{index}", user=f"{arm}{user}", arm=arm, version=number, ended_at=at + 1.0
                )
                seen.rated.append((turn, Reward(turn=turn.id, value=value, function="tab@1", signals=(), at=at)))
    return seen


LAST = 1_600.0
SEEN = observed(
    (Arm.LIVE, 12, START, LAST, 4, 6, 0),  # before the last third: must not count
    (Arm.LIVE, 12, LAST, END, 6, 2, 4),
    (Arm.CONTROL, 5, LAST, END, 4, 6, 2),
)


def test_the_result_is_that_of_the_last_third():
    said = dict(arm_summary(SEEN, START, END))
    assert said["suggestions per request, live arm, last third"].startswith("66.7% [")
    assert said["suggestions per request, live arm, last third"].endswith("of 144")
    assert said["accept rate, live arm, last third"].startswith("75.0% [")
    assert said["accept rate, live arm, last third"].endswith("of 96")
    assert said["suggestions per request, control arm, last third"].startswith("83.3% [")
    assert said["accept rate, control arm, last third"].startswith("40.0% [")
    assert said["suggestions, live against control"].startswith("-20%, 95% [")
    assert "-16.7 pp" in said["suggestions, live against control"]
    assert said["accept rate, live against control"].startswith("+88%, 95% [")
    assert "+35.0 pp" in said["accept rate, live against control"]


def test_the_live_arm_is_named_first():
    assert next(label for label, _ in arm_summary(SEEN, START, END)).startswith("suggestions per request, live")


@pytest.mark.parametrize("groups", [(), ((Arm.LIVE, 5, LAST, END, 1, 1, 1),), ((Arm.CONTROL, 1, LAST, END, 1, 1, 1),)])
def test_without_two_users_on_each_side_nothing_is_claimed(groups):
    said = dict(arm_summary(observed(*groups), START, END))
    assert said["suggestions, live against control"].startswith("unknown")
    assert said["accept rate, live against control"].startswith("unknown")


def test_curves_have_each_window_s_own_shares():
    suggested, accepted = share_curves(SEEN, START, END)
    assert [curve.arm for curve in suggested] == ["live", "control"]
    live = suggested[0].points
    assert live[0].mean == 1.0
    assert live[0].lower < 1.0  # of twelve users who all say the same, another might not
    assert live[-1].t == pytest.approx(15.0)
    assert sum(point.n for point in live) == 12 * 22
    assert sum(point.n for point in accepted[0].points) == 12 * 18
    assert all(point.t > 10 for point in suggested[1].points)


def test_the_screen_shows_both_shares_of_both_arms():
    console = Console(width=140)
    with console.capture() as captured:
        console.print(recent_suggestions(SEEN, END))
    text = captured.get()
    assert text.index("live") < text.index("control (frozen)")
    assert "v1" in text
    assert "v2" in text


def test_calibration_holds_each_family_under_both_policies():
    def item(name):
        return Item(name, name[0])

    items = [item(name) for name in ("a1", "a2", "b1", "b2")]
    before = [
        ItemScore(item=item.id, draw=draw, score=score) for item in items for draw, score in enumerate((1.0, 0.0, T))
    ]
    after = [
        ItemScore(item=item.id, draw=draw, score=1.0 if item.family == "a" else T)
        for item in items
        for draw in range(3)
    ]
    found = calibrated(before, after, items, T)
    assert found.threshold == T
    assert [family.family for family in found.families] == ["a", "b"]
    a, b = found.families
    assert a.before.suggested.mean == pytest.approx(2 / 3)
    assert a.before.accepted.mean == 0.5
    assert (a.after.suggested.mean, a.after.accepted.mean) == (1.0, 1.0)
    assert (b.after.suggested.mean, b.after.accepted) == (0.0, None)
    assert (b.after.suggested.n, a.after.accepted.n) == (6, 6)
    assert [value for _, value in side_rows(found)] == [
        "66.7% before, 50.0% after, 2 of 2 families",
        "no such family",
    ]


def test_where_suggestions_pay_is_what_the_last_model_has_right():
    items = [Item(name, name[0]) for name in ("a1", "a2", "b1", "b2")]

    def scores(**by_family):
        return [
            ItemScore(item=item.id, draw=draw, score=score)
            for item in items
            for draw, score in enumerate(by_family[item.family])
        ]

    # a becomes right and is always suggested; b stays wrong and is suggested once in four
    found = calibrated(
        scores(a=(0.0, 0.0, T, T), b=(0.0, 0.0, 0.0, T)), scores(a=(1.0,) * 4, b=(0.0, T, T, T)), items, T
    )
    pays, pays_not = side_rows(found)
    assert pays[0].endswith("where it pays")
    assert pays[1] == "50.0% before, 100.0% after, 1 of 2 families"
    assert pays_not[1] == "75.0% before, 25.0% after, 1 of 2 families"
