"""Credit within groups: figures a person can check, and the gradient against enumeration."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from benchmarks.reward.bad_turn import ASKED_NOW, Belief, group, plain, suspects, until_fixed

from ostinato.core.errors import NoSignal
from ostinato.core.records import Arm, Batch, PolicyVersion, Reward, Turn
from ostinato.core.verdicts import continuation_name
from ostinato.reward.baseline import Baseline
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import (
    BeliefWeighted,
    ByOrigin,
    GroupRelative,
    SingleRollout,
    belief_factors,
    by_episode,
)
from ostinato.reward.pipeline import training_batch
from ostinato.testing.records import a_turn
from ostinato.train.losses import policy_loss


def rollouts(group: str | None, *lengths: int, arm: Arm = Arm.WORLD, sampled: tuple[int, ...] = (7, 9)):
    """One episode per entry, of so many turns."""
    return [
        replace(
            a_turn(f"{group}-{member}-{place}:0", sampled=sampled, prompt=(1, member, place)),
            episode=f"{group}-{member}",
            group=group,
            arm=arm,
        )
        for member, length in enumerate(lengths)
        for place in range(length)
    ]


def final(turns, *grades: float) -> dict[str, float]:
    """Grades on the last turns of the episodes, 0 on all others."""
    return {
        turn.id: grade if turn is episode.turns[-1] else 0.0
        for episode, grade in zip(by_episode(turns), grades, strict=True)
        for turn in episode.turns
    }


def test_an_advantage_is_the_return_less_the_groups_mean():
    turns = rollouts("g", 1, 1, 1, 1)
    found = GroupRelative()(by_episode(turns), final(turns, 1.0, 0.0, 0.0, 0.5))
    assert [found[turn.id] for turn in turns] == [(0.625,) * 2, (-0.375,) * 2, (-0.375,) * 2, (0.125,) * 2]


def test_every_token_of_every_turn_gets_its_episodes_advantage():
    turns = rollouts("g", 3, 1)
    found = GroupRelative()(by_episode(turns), final(turns, 1.0, 0.0))
    assert [found[turn.id] for turn in turns] == [(0.5, 0.5)] * 3 + [(-0.5, -0.5)]


def test_no_spread_is_divided_out():
    turns = rollouts("g", 1, 1)
    near = GroupRelative()(by_episode(turns), final(turns, 0.51, 0.5))
    assert near[turns[0].id][0] == pytest.approx(0.005)


def test_groups_are_compared_with_themselves_only():
    turns = rollouts("easy", 1, 1) + rollouts("hard", 1, 1)
    found = GroupRelative()(by_episode(turns), final(turns, 1.0, 0.9, 0.1, 0.0))
    assert [found[turn.id][0] for turn in turns] == pytest.approx([0.05, -0.05, 0.05, -0.05])


def test_the_same_name_with_another_tenant_is_another_group():
    theirs = [replace(turn, tenant="acme", id=f"acme-{turn.id}") for turn in rollouts("g", 1, 1)]
    turns = rollouts("g", 1, 1) + theirs
    found = GroupRelative()(by_episode(turns), final(turns, 1.0, 0.0, 3.0, 2.0))
    assert [found[turn.id][0] for turn in turns] == [0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("size", [1, 2, 16, 128])
@pytest.mark.parametrize("grade", [0.0, 0.1, 1.0])
def test_a_group_in_which_all_did_alike_teaches_exactly_nothing(size: int, grade: float):
    flat, other = rollouts("flat", *[1] * size), rollouts("other", 1, 1)
    turns = flat + other
    found = GroupRelative()(by_episode(turns), final(turns, *[grade] * size, 1.0, 0.0))
    assert {found[turn.id] for turn in flat} == {(0.0, 0.0)}
    assert found[other[0].id] == (0.5, 0.5)
    with pytest.raises(NoSignal, match="in none of 1 groups"):
        GroupRelative()(by_episode(flat), final(flat, *[grade] * size))


def test_one_success_of_eight_by_hand():
    """7/8 and -1/8: not divided by the spread (2.65 and -0.38), not by those of the others (1 and -1/7)."""
    turns = rollouts("g", *[1] * 8)
    found = GroupRelative()(by_episode(turns), final(turns, 1.0, *[0.0] * 7))
    assert [found[turn.id][0] for turn in turns] == [0.875] + [-0.125] * 7


def test_who_alone_was_graded_of_a_group_teaches_nothing():
    """What other rollouts of the group were worth nobody knows: its grade is no advantage over them."""
    alone, other = rollouts("torn", 1), rollouts("other", 1, 1)
    found = GroupRelative()(by_episode(alone + other), final(alone + other, 1.0, 1.0, 0.0))
    assert found[alone[0].id] == (0.0, 0.0)
    with pytest.raises(NoSignal, match="in none of 1 groups"):
        GroupRelative()(by_episode(alone), final(alone, 1.0))


def test_nothing_at_all_and_nonsense_are_refused():
    with pytest.raises(NoSignal, match="batch is empty"):
        GroupRelative()([], {})
    turns = rollouts("g", 1, 1)
    with pytest.raises(ValueError, match="not finite"):
        GroupRelative()(by_episode(turns), final(turns, 1.0, float("nan")))


def mixed(config: RewardConfig | None = None) -> ByOrigin:
    return ByOrigin(people=SingleRollout(config or RewardConfig(), Baseline()), worlds=GroupRelative())


def test_worlds_and_people_in_one_batch_are_credited_each_by_its_own_rule():
    people, worlds = rollouts(None, 1, arm=Arm.LIVE), rollouts("g", 2, 1)
    values = final(people, 0.75) | final(worlds, 1.0, 0.0)
    found = mixed()(by_episode(people + worlds), values)
    assert found[people[0].id] == (1.0, 1.0)
    assert [found[turn.id][0] for turn in worlds] == [0.5, 0.5, -0.5]


@pytest.mark.parametrize("weight", [0.2, 0.4, 0.8])
def test_the_worlds_share_of_a_step_is_as_set(weight: float):
    """Turns of several tokens, people's episodes of two turns, rollouts of one and of three, and one group without a difference."""
    people = [t for n in range(4) for t in rollouts(None, 2, arm=Arm.LIVE)]
    people = [replace(turn, id=f"p{n}:0", episode=f"p{n // 2}", user=f"u{n}") for n, turn in enumerate(people)]
    worlds, flat = rollouts("g", 1, 3, 1, 1, sampled=(7, 8, 9)), rollouts("flat", 1, 1)
    values = final(worlds, 1.0, 0.0, 0.0, 0.0) | final(flat, 1.0, 1.0)
    values |= {turn.id: 0.75 if n % 3 else -0.25 for n, turn in enumerate(people)}
    turns = [*people, *worlds, *flat]
    rule = ByOrigin(people=SingleRollout(RewardConfig(), Baseline()), worlds=GroupRelative(), worlds_weight=weight)
    found, plain = rule(by_episode(turns), values), mixed()(by_episode(turns), values)
    row = Batch(
        step=1,
        turns=tuple(turn.id for turn in turns),
        credits=tuple(found[turn.id] for turn in turns),
        reference=PolicyVersion(number=0, hash="0"),
        at=0.0,
        even=True,
    )
    rewards = [Reward(turn=turn.id, value=values[turn.id], function="f@1", signals=(), at=0.0) for turn in turns]
    sizes = {True: list[float](), False: list[float]()}
    for sample in training_batch(row, turns, rewards).samples:
        sizes[sample.turn in people] += [sample.factor * a for a in sample.advantages if a]
    rms = {who: math.sqrt(sum(a * a for a in each) / len(each)) for who, each in sizes.items()}
    assert rms[False] / rms[True] == pytest.approx(weight)
    assert all(found[turn.id] == plain[turn.id] for turn in people), "people's are as ever"
    ratios = {a / b for turn in worlds for a, b in zip(found[turn.id], plain[turn.id], strict=True)}
    assert max(ratios) == pytest.approx(min(ratios)), "the direction within a group is as ever"


def test_rollouts_that_hardly_differ_are_not_blown_up():
    people, worlds = rollouts(None, 1, arm=Arm.LIVE), rollouts("g", 1, 1)
    rule = ByOrigin(people=SingleRollout(RewardConfig(), Baseline()), worlds=GroupRelative(), worlds_weight=1.0)
    found = rule(by_episode(people + worlds), final(people, 0.75) | final(worlds, 0.51, 0.5))
    assert found[worlds[0].id][0] == pytest.approx(4 * 0.005)


def test_no_cap_bites_on_a_world_and_a_clients_group_is_no_way_around_one():
    config = RewardConfig(user_cap=0.01, tenant_cap=0.01)
    worlds = [replace(turn, user="world") for turn in rollouts("g", 1, 1, 1, 1)]
    others = [replace(turn, user=f"u{n}") for n, turn in enumerate(rollouts(None, *[1] * 9, arm=Arm.LIVE))]
    greedy = [replace(turn, user="greedy") for turn in rollouts("mine", *[1] * 40, arm=Arm.LIVE)]
    turns = worlds + others + greedy
    values = final(worlds, 1.0, 0.0, 0.0, 0.0) | final(others, *[0.5, -0.5] * 4, 0.5) | final(greedy, *[1.0] * 40)
    found = mixed(config)(by_episode(turns), values)
    assert found[worlds[0].id][0] == 0.75
    assert 0 < found[greedy[0].id][0] < 0.1  # 40 episodes of one person among ten count as two


def test_one_side_without_contrast_does_not_silence_the_other():
    people, worlds = rollouts(None, 1, 1, arm=Arm.LIVE), rollouts("g", 1, 1)
    turns = by_episode(people + worlds)
    found = mixed()(turns, final(people, 0.5, 0.5) | final(worlds, 1.0, 0.0))
    assert [found[turn.id][0] for turn in people + worlds] == [0.0, 0.0, 0.5, -0.5]
    found = mixed()(turns, final(people, 0.75, -0.25) | final(worlds, 1.0, 1.0))
    assert found[people[0].id][0] > 0 > found[people[1].id][0]
    assert found[worlds[0].id][0] == 0.0
    with pytest.raises(NoSignal, match=r"all 2 rewards.*in none of 1 groups"):
        mixed()(turns, final(people, 0.5, 0.5) | final(worlds, 1.0, 1.0))


# ---------------------------------------------------------------- equal states, continuations, belief


def at(episode: str, *prompts: tuple[int, ...]) -> list[Turn]:
    """A rollout with these prompts."""
    made = [a_turn(f"{episode}-{n}:0", prompt=prompt, sampled=(7, 9)) for n, prompt in enumerate(prompts)]
    return [replace(turn, episode=episode, group="g", arm=Arm.WORLD) for turn in made]


def test_a_turn_is_compared_with_those_at_the_same_prompt():
    """Two of four came to (2,), one of whom failed; what followed there is compared where they last met, and who was alone with all."""
    a, b = at("a", (1,), (2,), (5,)), at("b", (1,), (2,), (6,))
    c, d = at("c", (1,), (3,)), at("d", (1,), (4,))
    turns = [*a, *b, *c, *d]
    values = final(turns, 1.0, 0.0, 0.0, 0.0)
    found = GroupRelative(equal_states=True)(by_episode(turns), values)
    assert [found[turn.id][0] for turn in turns] == [0.75, 0.5, 0.5, -0.25, -0.5, -0.5, -0.25, -0.25, -0.25, -0.25]
    plain = GroupRelative()(by_episode(turns), values)
    assert [plain[turn.id][0] for turn in turns] == [0.75] * 3 + [-0.25] * 7


def test_prompts_that_only_the_beginning_shares_change_nothing():
    turns = [turn for n in range(4) for turn in at(f"e{n}", (1,), (2, n), (3, n))]
    values = final(turns, 1.0, 0.5, 0.0, 0.0)
    assert GroupRelative(equal_states=True)(by_episode(turns), values) == GroupRelative()(by_episode(turns), values)


def test_a_prompt_that_comes_again_within_one_rollout_counts_once():
    turns = [*at("a", (1,), (2,), (2,)), *at("b", (1,), (2,))]
    found = GroupRelative(equal_states=True)(by_episode(turns), final(turns, 1.0, 0.0))
    assert [found[turn.id][0] for turn in turns] == [0.5] * 3 + [-0.5] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_states_keep_the_direction_of_the_gradient_at_each_turn(size: int):
    """By enumeration: a first answer leads to one of two states, in which a second one succeeds or not; each with chances of its own."""
    first, second, worth = (0.3, 0.7), ((0.2, 0.8), (0.6, 0.4)), ((1.0, 0.0), (0.0, 1.0))
    paths = list(itertools.product(ACTIONS, ACTIONS))
    chance = {path: first[path[0]] * second[path[0]][path[1]] for path in paths}
    slopes = dict.fromkeys([("first",), ("second", 0), ("second", 1)], 0.0)
    for drawn in itertools.product(paths, repeat=size):
        turns = [turn for e, path in enumerate(drawn) for turn in at(f"e{e}", (1,), (2, path[0]))]
        values = final(turns, *(worth[a][b] for a, b in drawn))
        try:
            found = GroupRelative(equal_states=True)(by_episode(turns), values)
        except NoSignal:
            continue
        mass = math.prod(chance[path] for path in drawn) / size
        for e, (a, b) in enumerate(drawn):
            slopes[("first",)] += mass * found[f"e{e}-0:0"][0] * (a - first[1])
            slopes[("second", a)] += mass * found[f"e{e}-1:0"][0] * (b - second[a][1])
    values_of = [sum(p * w for p, w in zip(second[a], worth[a], strict=True)) for a in ACTIONS]
    exact = {("first",): first[0] * first[1] * (values_of[1] - values_of[0])}
    exact |= {("second", a): first[a] * second[a][0] * second[a][1] * (worth[a][1] - worth[a][0]) for a in ACTIONS}
    assert slopes[("first",)] == pytest.approx((size - 1) / size * exact[("first",)])
    for a in ACTIONS:
        assert 0 < slopes[("second", a)] / exact[("second", a)] < 1


def test_continuations_are_compared_with_each_other_and_teach_their_first_turns_alone():
    whole, other = at("e0", (1,), (2,), (3,)), at("e1", (1,), (4,))
    again = [at(continuation_name("e0", 1, n), (2,), (8, n)) for n in range(3)]
    elsewhere = at(continuation_name("e0", 2, 0), (3,))
    turns = [*whole, *other, *(turn for each in again for turn in each), *elsewhere]
    found = GroupRelative()(by_episode(turns), final(turns, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0))
    assert [found[turn.id][0] for turn in (*whole, *other)] == [-0.5] * 3 + [0.5] * 2, "as without them"
    assert [[found[turn.id][0] for turn in each] for each in again] == [
        [pytest.approx(2 / 3), 0.0],
        [pytest.approx(-1 / 3), 0.0],
        [pytest.approx(-1 / 3), 0.0],
    ]
    assert found[elsewhere[0].id][0] == 0.0, "one alone tells nothing"


def test_a_group_of_failures_teaches_by_its_continuations():
    whole = [turn for n in range(2) for turn in at(f"e{n}", (1,), (2, n))]
    again = [at(continuation_name("e0", 1, n), (2, 0)) for n in range(2)]
    turns = [*whole, *(turn for each in again for turn in each)]
    found = GroupRelative()(by_episode(turns), final(turns, 0.0, 0.0, 1.0, 0.0))
    assert [found[turn.id][0] for turn in turns] == [0.0] * 4 + [0.5, -0.5]


def test_factors_of_belief_keep_their_mean_and_their_bounds():
    rng = random.Random(5)
    for _ in range(2_000):
        changes = [rng.choice([0.0, rng.uniform(-1, 1), rng.gauss(0, 0.01)]) for _ in range(rng.randint(1, 9))]
        tokens = [rng.randint(1, 50) for _ in changes]
        strength, most = rng.random(), rng.uniform(1.01, 40)
        factors = belief_factors(changes, tokens, strength=strength, most=most)
        assert sum(map(math.prod, zip(factors, tokens, strict=True))) / sum(tokens) == pytest.approx(1.0)
        assert 1 - strength - 1e-9 <= min(factors) <= max(factors) <= most + 1e-9
        backward = [factor for change, factor in zip(changes, factors, strict=True) if change <= 0]
        assert len({*backward}) <= 1, "what went the other way is told apart no further"


def test_factors_of_belief_by_hand():
    assert belief_factors([0.0, 0.6, -0.2], [1, 1, 1], strength=1.0, most=8.0) == [0.0, 3.0, 0.0]
    assert belief_factors([0.0, 0.6, 0.0], [1, 1, 1], strength=0.5, most=8.0) == [0.5, 2.0, 0.5]
    assert belief_factors([0.0, 0.6, 0.0], [1, 1, 1], strength=1.0, most=2.0) == [0.5, 2.0, 0.5]
    assert belief_factors([0.0, 0.6], [3, 1], strength=1.0, most=8.0) == [0.0, 4.0]
    assert belief_factors([-0.5, 0.0], [1, 1], strength=1.0, most=8.0) == [1.0, 1.0]


def test_belief_divides_an_episodes_credit_and_never_turns_it():
    turns = [*at("good", (1,), (2,), (3,)), *at("bad", (1,), (4,), (5,))]
    changes = dict(zip([turn.id for turn in turns], (0.4, 0.0, -0.1, 0.3, -0.6, 0.0), strict=True))
    rule = BeliefWeighted(GroupRelative(), changes, strength=1.0, most=8.0)
    found = rule(by_episode(turns), final(turns, 1.0, 0.0))
    assert [found[turn.id][0] for turn in turns] == pytest.approx([1.5, 0.0, 0.0, 0.0, -1.5, 0.0])
    half = BeliefWeighted(GroupRelative(), changes, strength=0.5, most=8.0)(by_episode(turns), final(turns, 1.0, 0.0))
    assert [half[turn.id][0] for turn in turns] == pytest.approx([1.0, 0.25, 0.25, -0.25, -1.0, -0.25])


def test_an_episode_of_which_a_turns_belief_is_not_known_is_credited_evenly():
    turns = [*at("good", (1,), (2,)), *at("bad", (1,), (3,))]
    changes = {turns[0].id: 0.4, turns[1].id: 0.0, turns[2].id: -0.5}
    found = BeliefWeighted(GroupRelative(), changes, strength=1.0, most=8.0)(by_episode(turns), final(turns, 1.0, 0.0))
    assert [found[turn.id][0] for turn in turns] == [1.0, 0.0, -0.5, -0.5]


def test_belief_counts_among_the_turns_that_are_credited():
    """A continuation's later turns get none: its first turn's factor is 1, whatever came after it."""
    again = [at(continuation_name("e0", 1, n), (2,), (8, n)) for n in range(2)]
    turns = [turn for each in again for turn in each]
    changes = {turn.id: 0.1 if turn.id.endswith("-0:0") else 0.7 for turn in turns}
    found = BeliefWeighted(GroupRelative(), changes, strength=1.0, most=8.0)(by_episode(turns), final(turns, 1.0, 0.0))
    assert [found[turn.id][0] for turn in turns] == [0.5, 0.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("turns", "drift", "seeds", "kind"),
    [
        (10, 0.02, (0, 1, 2), lambda n: plain(lambda bad: group(n, bad=bad, belief=Belief(ASKED_NOW, 0.1)))),
        (40, 0.005, (0, 2), lambda n: suspects(n, belief=Belief(ASKED_NOW, 0.1), failures=16)),
    ],
)
def test_belief_and_suspects_fix_a_bad_turn_that_the_outcome_alone_does_not(turns, drift, seeds, kind):
    """`python -m benchmarks.reward.bad_turn` in small, at the same step size."""

    def fixed(make, seed: int) -> bool:
        return until_fixed(turns, make, 0.5, seed, drift, 288) is not None

    assert not any(fixed(plain(lambda _: group(turns)), seed) for seed in seeds), "drifted, or not fixed by then"
    assert all(fixed(kind(turns), seed) for seed in seeds)


# ---------------------------------------------------------------- the gradient, by the very numbers that reach the trainer

ACTIONS = (0, 1)


def gradient_of(batch, logits: torch.Tensor) -> torch.Tensor:
    """The loss's gradient times its normaliser over a two-action policy whose first action ends the episode or goes on."""
    samples = batch.samples
    tokens = [(token, place) for place, sample in enumerate(samples) for token in sample.turn.sampled_ids]
    chosen = torch.log_softmax(logits, -1)[[token for token, _ in tokens]]
    loss = policy_loss(
        chosen,
        behaviour_M=chosen.detach(),
        advantages_M=torch.tensor([a for sample in samples for a in sample.advantages]),
        turns_M=torch.tensor([place for _, place in tokens]),
        normaliser=sum(sample.weight for sample in samples),
        shares_M=torch.tensor([sample.factor for sample in samples for _ in sample.advantages]),
    )
    (found,) = torch.autograd.grad(loss, logits)
    return -found


EPISODES = (((1,),), ((0,), (1,)), ((0,), (0,)))  # turns' tokens: 1 stops; at most two turns


def worth(episode) -> float:
    """Twice asked and stopped is right."""
    return float(episode == ((0,), (1,)))


def probability(episode, p: torch.Tensor) -> torch.Tensor:
    return torch.stack([p[token] for turn in episode for token in turn]).prod()


def test_the_gradient_of_groups_is_the_enumerated_one_whatever_the_number_of_turns():
    """All groups of two, each weighed with its probability: the mean gradient is (n - 1) / n of that of the expected return."""
    logits = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    p = torch.softmax(logits, -1)
    expected = sum(probability(episode, p) * worth(episode) for episode in EPISODES)
    (exact,) = torch.autograd.grad(expected, logits)
    total, by_share = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for pair in itertools.product(EPISODES, repeat=2):
        chance = float((probability(pair[0], p) * probability(pair[1], p)).detach())
        turns = [
            replace(turn, sampled_ids=tokens, logprobs=(-0.5,), spans=turn.spans)
            for turn, tokens in zip(
                rollouts("g", *map(len, pair), sampled=(7,)), [turn for each in pair for turn in each], strict=True
            )
        ]
        values = final(turns, *map(worth, pair))
        if len(set(map(worth, pair))) == 1:
            continue
        credits = GroupRelative()(by_episode(turns), values)
        row = Batch(
            step=1,
            turns=tuple(turn.id for turn in turns),
            credits=tuple(credits[turn.id] for turn in turns),
            reference=PolicyVersion(number=0, hash="0"),
            at=0.0,
        )
        rewards = [Reward(turn=turn, value=value, function="f", signals=(), at=0.0) for turn, value in values.items()]
        batch = training_batch(row, turns, rewards)
        assert sum(sample.weight for sample in batch.samples) == pytest.approx(2.0)
        total += chance * gradient_of(batch, logits)
        shared = replace(batch, samples=tuple(replace(sample, summed=False) for sample in batch.samples))
        by_share += chance * gradient_of(shared, logits)
    assert torch.allclose(total, exact / 2, rtol=1e-6)
    assert not torch.allclose(by_share, exact / 2, rtol=1e-1)  # a part of the episode is a normalisation by its length
