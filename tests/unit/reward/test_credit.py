"""Credit: figures a person can check."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ostinato.core.errors import NoSignal
from ostinato.core.records import Turn
from ostinato.core.samples import call_of
from ostinato.reward.baseline import Baseline, context_of
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode, leave_one_out, returns
from ostinato.reward.recent_shares import turn_weights
from ostinato.testing.records import a_turn


class Expecting(Baseline):
    """A baseline whose predictions are given, by prompt."""

    def __init__(self, values: dict[str, float] | None = None) -> None:
        super().__init__()
        self.values = values or {}

    def predict(self, context):
        return self.values.get(context.prompt, 0.0)


def turns_of(users: list[str], **fields) -> list[Turn]:
    """One turn per entry, each an episode of its own with a prompt of its own."""
    return [
        replace(a_turn(f"t{i}:0", prompt=(i, 1), sampled=(7,)), user=user, **fields) for i, user in enumerate(users)
    ]


def credit(rewards: list[float], expected: list[float], users: list[str], *, cap: float = 1.0, **fields) -> list[float]:
    """The advantage of each of so many single turns."""
    turns = turns_of(users)
    values = {context_of(turn).prompt: value for turn, value in zip(turns, expected, strict=True)}
    single = SingleRollout(RewardConfig(user_cap=cap, tenant_cap=1.0, **fields), Expecting(values))
    found = single(by_episode(turns), {turn.id: reward for turn, reward in zip(turns, rewards, strict=True)})
    return [found[turn.id][0] for turn in turns]


@pytest.mark.parametrize("reward", [1.0, -1.0, 0.75, -0.25])
def test_one_turn_moves_the_policy_in_the_direction_of_its_reward(reward: float):
    assert credit([reward], [0.0], ["u"]) == [math.copysign(1.0, reward)]


def test_advantages_are_residuals_over_their_rms():
    rewards, baseline = [0.75, -0.25, 0.0, 0.75], [0.25, 0.25, 0.25, 0.5]
    residuals = np.array([0.5, -0.5, -0.25, 0.25])
    expected = residuals / np.sqrt(np.mean(residuals**2))
    assert credit(rewards, baseline, ["a", "b", "a", "b"]) == pytest.approx(expected.tolist(), abs=1e-15)


def test_what_a_name_is_expected_to_earn_counts_only_where_names_count():
    expected: list[tuple[str, str]] = []

    class Asked(Expecting):
        def predict(self, context):
            expected.append(context.person)
            return 0.0

    turns = [replace(turn, verified=i == 0) for i, turn in enumerate(turns_of(["ann", "bob"]))]
    values = {turn.id: float(i) for i, turn in enumerate(turns)}
    for users in ("declared", "verified"):
        SingleRollout(RewardConfig(users=users), Asked())(by_episode(turns), values)
    assert expected == [("default", "ann"), ("default", "bob"), ("default", "ann"), ("default", "")]


@pytest.mark.parametrize(
    ("rewards", "baseline", "why"),
    [
        ([], [], "batch is empty"),
        ([-0.25] * 8, [0.1 * i for i in range(8)], "all 8 rewards are -0.25"),
        ([0.5, 0.5], [0.0, 0.0], "all 2 rewards are 0.5"),
        ([0.5, -0.5], [0.5, -0.5 + 1e-9], "the baseline explains every reward"),
        ([0.0], [0.0], "the baseline explains every reward"),
    ],
)
def test_a_batch_that_teaches_nothing_is_refused_and_says_why(rewards: list[float], baseline: list[float], why: str):
    with pytest.raises(NoSignal, match=why):
        credit(rewards, baseline, ["u"] * len(rewards))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rewards_must_be_finite(value: float):
    with pytest.raises(ValueError, match="finite"):
        credit([value, 1.0], [0.0, 0.0], ["a", "b"])


@pytest.mark.parametrize("huge", [1e200, -1e200, 1.7e308])
def test_one_finite_reward_of_any_size_gives_finite_credit(huge: float):
    advantages = credit([huge, huge, 0.5, -0.5], [0.0] * 4, ["a", "a", "b", "c"])
    assert all(map(math.isfinite, advantages))
    assert advantages[0] == pytest.approx(math.copysign(math.sqrt(2), huge))
    baseline = Baseline()
    for turn in turns_of(["a", "b"] * 20):
        baseline.observe(context_of(turn), huge, 5)
        assert math.isfinite(baseline.predict(context_of(turn)))


# ---------------------------------------------------------------- episodes


def episode_of(rewards: list[float], name: str = "e") -> list[Turn]:
    return [
        replace(a_turn(f"{name}{i}:0", prompt=(i, len(name)), sampled=(7, 8)), episode=name)
        for i in range(len(rewards))
    ]


def test_a_terminal_reward_reaches_every_turn_before_it():
    good, bad = episode_of([0, 0, 1], "good"), episode_of([0, 0, -1], "bad")
    single = SingleRollout(RewardConfig(discount=0.5, user_cap=1.0), Baseline())
    found = single(by_episode(good + bad), {turn.id: 0.0 for turn in good + bad} | {"good2:0": 1.0, "bad2:0": -1.0})
    first = [found[turn.id] for turn in good]
    assert first[0][0] == pytest.approx(first[2][0] / 4)
    assert first[1][0] == pytest.approx(first[2][0] / 2)
    assert first[2][0] > 0
    assert [found[turn.id] for turn in bad] == [tuple(-value for value in values) for values in first]
    assert all(len(found[turn.id]) == 2 for turn in good + bad)


def test_returns_are_discounted_sums_of_what_follows():
    calls = ["a:0", "b:0", "c:0"]
    assert returns(calls, [1.0, 2.0, 3.0], 1.0) == [6.0, 5.0, 3.0]
    assert returns(calls, [1.0, 2.0, 3.0], 0.0) == [1.0, 2.0, 3.0]
    assert returns(calls, [0.0, 0.0, 1.0], 0.9) == pytest.approx([0.81, 0.9, 1.0])


def test_the_choices_of_one_call_do_not_follow_each_other():
    calls = ["a:0", "b:0", "b:1", "b:2", "c:0"]
    assert returns(calls, [0.0, 1.0, 0.0, 0.0, 0.5], 0.5) == [0.5 * (1.25 + 0.25 + 0.25) / 3, 1.25, 0.25, 0.25, 0.5]


# ---------------------------------------------------------------- one prompt, several answers


def asked(*people, calls=None):
    """A turn of the same prompt for each person."""
    return [
        replace(a_turn(f"{calls[i] if calls else i}:{i}", prompt=(5, 1), sampled=(7,)), user=who, episode=f"e-{who}")
        for i, who in enumerate(people)
    ]


def baselines(turns, reached, *, weights=None, expected=0.0, evidence=2.0):
    contexts, calls, n = [context_of(turn) for turn in turns], [call_of(turn.id) for turn in turns], len(turns)
    weights = np.ones(n) if weights is None else np.array(weights)
    found = leave_one_out(contexts, calls, np.array(reached), weights, np.full(n, expected), np.full(n, evidence))
    return found.tolist()


def test_what_others_got_for_the_same_prompt_counts_as_so_many_more_turns_of_it():
    assert baselines(asked("ann", "bob", "eve"), [1.0, 0.5, 0.0]) == [0.5 / 4, 1.0 / 4, 1.5 / 4]
    assert baselines(asked("ann", "ann"), [1.0, 0.5]) == [0.0, 0.0], "the second turn is there because of the first"
    assert baselines(asked("ann", "ann", calls="cc"), [1.0, 0.5]) == [0.5 / 3, 1.0 / 3]
    other = replace(asked("bob")[0], tenant="acme")
    assert baselines([*asked("ann"), other], [1.0, 0.5]) == [0.0, 0.0], "tenants learn nothing of each other"


def test_turns_that_were_drawn_count_for_those_that_were_not():
    assert baselines(asked("ann", "bob", "eve"), [0.0, 1.0, 0.0], weights=[1.0, 0.5, 3.0])[0] == 0.5 / 5.5


def test_choices_that_other_turns_follow_are_not_compared():
    """What came after the choice that was continued says nothing of the others."""
    first = [replace(turn, episode="e") for turn in asked("ann", "ann", calls="cc")]
    later = replace(a_turn("d:0", prompt=(5, 2), sampled=(7,)), user="ann", episode="e")
    values = {first[0].id: 0.0, first[1].id: 0.0, later.id: 1.0}
    alone = replace(asked("bob")[0], id="z:0", prompt_ids=(9,), episode="f")
    config = RewardConfig(user_cap=1.0, tenant_cap=1.0, discount=0.5)
    found = SingleRollout(config, Expecting())(by_episode([*first, later, alone]), values | {alone.id: -1.0})
    assert found[first[0].id] == found[first[1].id]
    assert found[first[0].id][0] == pytest.approx(found[later.id][0] / 2)


def test_comparing_people_leaves_the_gradients_mean_and_lowers_its_variance():
    """Three people ask the same, and each answer is one of two. By enumeration of all answers, for prompts that are worth more or less."""
    turns, chance, mean, square = asked("ann", "bob", "eve"), 0.3, {True: [], False: []}, {True: 0.0, False: 0.0}
    for worth in (0.0, 1.0):
        means = {True: 0.0, False: 0.0}
        for answers in product((0, 1), repeat=3):
            odds = math.prod(chance if answer else 1 - chance for answer in answers)
            reached = [worth + 0.2 * answer for answer in answers]
            for compared in (True, False):
                found = baselines(turns, reached, expected=0.5) if compared else [0.5] * 3
                gradient = sum((r - b) * (a - chance) for r, b, a in zip(reached, found, answers, strict=True))
                means[compared] += odds * gradient
                square[compared] += odds * gradient**2 / 2
        for compared in (True, False):
            mean[compared].append(means[compared])
    assert mean[True] == pytest.approx(mean[False])
    assert mean[True] == pytest.approx([3 * 0.2 * chance * (1 - chance)] * 2)
    assert square[True] < 0.5 * square[False]


def test_the_default_discount_lets_a_reward_be_felt_ten_turns_back_and_bounds_what_a_long_talk_is_worth():
    gamma = RewardConfig().discount
    assert gamma**10 > 1 / 3
    assert returns([f"{i}:0" for i in range(1000)], [1.0] * 1000, gamma)[0] < 10.0 + 1e-9


def test_all_turns_weigh_the_same_and_in_earlier_batches_those_of_an_episode_shared_one():
    long, short = episode_of([1.0] * 20, "long"), [episode_of([0], f"s{i}")[0] for i in range(3)]
    episodes = [turn.episode for turn in long + short]
    assert turn_weights(episodes, even=True) == [4 / 23] * 23
    assert turn_weights(episodes, even=False) == [1 / 20] * 20 + [1.0] * 3
    assert turn_weights([], even=True) == turn_weights([], even=False) == []
    single = SingleRollout(RewardConfig(discount=0.0, user_cap=1.0, tenant_cap=1.0), Baseline())
    rewards = {turn.id: 1.0 for turn in long} | {turn.id: -1.0 for turn in short}
    found = single(by_episode(long + short), rewards)
    assert {round(abs(values[0]), 12) for values in found.values()} == {1.0}
    rewards |= {turn.id: 2.0 for turn in long}
    assert single(by_episode(long + short), rewards)["s0" + "0:0"][0] == pytest.approx(
        -1 / math.sqrt((20 * 2**2 + 3) / 23)
    )


def test_a_person_is_capped_by_the_weight_of_their_turns():
    long, others = episode_of([1.0] * 20, "long"), turns_of([f"u{i}" for i in range(20)])
    single = SingleRollout(RewardConfig(discount=0.0, user_cap=0.2, tenant_cap=1.0, user_steps=0), Baseline())
    turns = [replace(turn, sampled_ids=(7,)) for turn in long] + others
    rewards = {turn.id: 1.0 for turn in long} | {turn.id: -1.0 for turn in others}
    found = single(by_episode(turns), rewards)
    assert {round(abs(found[turn.id][0]), 12) for turn in others} == {1.0}
    assert [found[turn.id][0] for turn in long] == pytest.approx([0.25] * 20), (
        "twenty turns, and a fifth of what is left is five"
    )


def slope_of_dragging(weights_of) -> float:
    """The mean of d loss / d logit of 'go on' in episodes that half of the time are failures; those go on to their eighth turn, or end at
    their second, as a fair coin has it. No episode is worth more for being long.
    """
    rng, turns, went_on, rewards = np.random.default_rng(0), [], {}, {}
    for number in range(400):
        fails, drags = rng.random() < 0.5, rng.random() < 0.5
        length = 8 if fails and drags else 2
        members = episode_of([0.0] * length, f"e{number}-")
        rewards |= {turn.id: 0.0 if fails else 1.0 for turn in members}
        went_on |= {turn.id: 0.0 for turn in members}
        if fails:
            went_on[members[1].id] = 0.5 if drags else -0.5
        turns += members
    single = SingleRollout(RewardConfig(discount=0.0, user_cap=1.0, tenant_cap=1.0, user_steps=0), Baseline())
    # a baseline that knows the episode's kind on average: what is left is the choice's own worth
    found = single(by_episode(turns), {id: value - 0.5 for id, value in rewards.items()})
    weights = weights_of([turn.episode for turn in turns])
    return sum(
        weight * found[turn.id][0] * went_on[turn.id] for turn, weight in zip(turns, weights, strict=True)
    ) / sum(map(abs, went_on.values()))


def test_failing_slowly_is_not_rewarded():
    shared = slope_of_dragging(lambda episodes: turn_weights(episodes, even=False))
    even = slope_of_dragging(lambda episodes: turn_weights(episodes, even=True))
    assert shared > 0.1, "each turn of a long failure was penalised less"
    assert abs(even) < 0.05


def test_episodes_of_one_name_with_two_tenants_are_two_episodes():
    ann, bob = a_turn("a:0"), a_turn("b:0")
    both = [replace(ann, episode="e", tenant="acme"), replace(bob, episode="e", tenant="rival")]
    assert [(each.tenant, each.id) for each in by_episode(both)] == [("acme", "e"), ("rival", "e")]


# ---------------------------------------------------------------- caps


def shares(advantages: list[float], users: list[str]) -> dict[str, float]:
    total = sum(map(abs, advantages))
    return {user: sum(abs(a) for a, u in zip(advantages, users, strict=True) if u == user) / total for user in users}


def test_a_flood_by_one_user_in_a_hundred_gets_the_cap_and_no_more():
    users = [f"u{i}" for i in range(99)] + ["attacker"] * 50
    rewards = [(-1.0) ** i for i in range(99)] + [1.0] * 50
    uncapped = credit(rewards, [0.0] * 149, users, cap=1.0, user_steps=0)
    capped = credit(rewards, [0.0] * 149, users, cap=0.03, user_steps=0)
    assert shares(uncapped, users)["attacker"] == pytest.approx(50 / 149)
    assert shares(capped, users)["attacker"] == pytest.approx(0.03)
    assert capped[:99] == uncapped[:99]
    assert len(set(capped[99:])) == 1
    assert capped[-1] > 0


def test_small_batches_cap_at_twice_an_equal_share():
    # one or two users: no cap
    assert shares(credit([1.0, 0.9, -0.1], [0.0] * 3, ["a", "a", "b"], cap=0.1), ["a", "a", "b"])["a"] == pytest.approx(
        0.95
    )
    # four users: half at most, not a tenth, which four users could not all keep to
    users = ["a"] * 7 + ["b", "c", "d"]
    mixed = credit([1.0] * 7 + [-1.0] * 3, [0.0] * 10, users, cap=0.1)
    assert shares(mixed, users)["a"] == pytest.approx(0.5)
    # users without any credit do not count as users
    assert credit([1.0, 0.0, 0.0, 0.0], [0.0] * 4, ["a", "b", "c", "d"], cap=0.1) == [2.0, 0.0, 0.0, 0.0]


def share_of_made_up_names(mode: str, verified: bool) -> float:
    """What an attacker with three honest percent of the turns, and a new name for each, gets of a batch with 97 honest users."""
    honest = [replace(turn, verified=True) for turn in turns_of([f"u{i}" for i in range(97)])]
    forged = [
        replace(a_turn(f"x{i}:0", prompt=(i, 2), sampled=(7,)), user=f"made-up-{i}", verified=verified)
        for i in range(50)
    ]
    single = SingleRollout(RewardConfig(user_cap=0.03, users=mode, tenant_cap=1.0), Baseline())
    rewards = {turn.id: (-1.0) ** i for i, turn in enumerate(honest)} | {turn.id: 1.0 for turn in forged}
    found = single(by_episode(honest + forged), rewards)
    return sum(abs(found[turn.id][0]) for turn in forged) / sum(abs(values[0]) for values in found.values())


def test_made_up_names_widen_a_share_unless_users_are_verified():
    assert share_of_made_up_names("declared", verified=False) == pytest.approx(50 / 147)
    assert share_of_made_up_names("verified", verified=False) == pytest.approx(0.03)
    # what a tenant vouches for cannot be told from real people
    assert share_of_made_up_names("verified", verified=True) == pytest.approx(50 / 147)


def test_a_tenant_that_floods_the_batch_gets_its_cap_whatever_names_it_makes_up():
    loud = turns_of([f"n{i}" for i in range(60)], tenant="loud")
    quiet = [
        replace(a_turn(f"{tenant}{i}:0", prompt=(i, 9), sampled=(7,)), user=f"q{i}", tenant=tenant)
        for tenant in "abcd"
        for i in range(5)
    ]
    single = SingleRollout(RewardConfig(user_cap=0.1, tenant_cap=0.4), Baseline())
    rewards = {turn.id: 1.0 for turn in loud} | {turn.id: -1.0 for turn in quiet}
    found = single(by_episode(loud + quiet), rewards)
    mass = {turn.id: abs(found[turn.id][0]) for turn in loud + quiet}
    assert sum(mass[turn.id] for turn in loud) / sum(mass.values()) == pytest.approx(0.4)
    assert {mass[turn.id] for turn in quiet} == {1.0}
