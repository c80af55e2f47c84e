"""How far a group may lie behind the trainer is bounded by the pace alone, however long its slowest rollout lasts."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.config import load
from ostinato.worlds.rollout.groups import Groups, most_steps_behind


def longest_lag(per_step: int, lead: int, window: int, chance) -> int:
    """The most steps that the trainer took between a group's draw and the step that took it, with ends in any order."""
    groups = Groups(["a", "b", "c"], token="w", epochs=0)
    drawn_at: dict[int, int] = {}
    waiting: list[int] = []  # told, in the order of their draws
    steps, longest = 0, 0
    for _ in range(300):
        while groups.may_begin(per_step=per_step, lead=lead, window=window):
            event = groups.draw(2)
            groups.apply(event)
            drawn_at[event["n"]] = steps
        under_way = [number for number, group in groups.open.items() if not group.told]
        may_take = len(waiting) >= per_step
        if under_way and not (may_take and chance.random() < 0.5):
            # the oldest is the slow one most of the time
            number = under_way[-1] if len(under_way) > 1 and chance.random() < 0.9 else under_way[0]
            for member in (0, 1):  # with contrast: what has none is not waited for
                end = {
                    "kind": "ended",
                    "n": number,
                    "member": member,
                    "episode": "",
                    "turns": [],
                    "grade": member,
                    "last": True,
                }
                groups.apply(end)
            groups.apply({"kind": "told", "n": number})
            waiting.append(number)
            waiting.sort()
        elif may_take:
            steps += 1
            for number in waiting[:per_step]:
                longest = max(longest, steps - 1 - drawn_at[number])
                groups.apply({"kind": "spent", "n": number})
            del waiting[:per_step]
    return longest


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 24), st.randoms(use_true_random=False))
def test_no_group_waits_longer_than_the_pace_allows(per_step, lead, window, chance):
    """Two steps of it are the weights' own delay, which this trainer has not."""
    assert (
        longest_lag(per_step, lead, window, chance)
        <= most_steps_behind(per_step=per_step, lead=lead, window=window) - 2
    )


def test_a_slow_group_does_fall_as_far_behind_as_is_said():
    """The oldest never ends as long as another one can: the bound is reached, and `lead` alone is none."""

    class Quick:
        """Chooses the youngest group, and to take steps, whenever asked."""

        def random(self) -> float:
            return 0.4

    assert longest_lag(1, 2, 8, Quick()) == most_steps_behind(per_step=1, lead=2, window=8) - 2 == 8


def test_as_it_is_set_by_default_nothing_is_too_stale():
    config = load(None, [])
    pace = config.worlds
    behind = most_steps_behind(per_step=pace.groups, lead=pace.lead, window=pace.window)
    assert behind <= config.reward.world_staleness
