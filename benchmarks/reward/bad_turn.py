"""Credit in long episodes: how many episodes it takes to fix one planted bad turn among many, if the other turns may hardly move.

A policy chooses one of four actions at each of N turns; all turns share its weights (a softmax over a linear map of random features, whose
products between two turns are 0.01 and noise of 0.08). At one turn, that nobody knows, it is right with a chance of 0.1, at all others with
0.9. An episode succeeds with 0.9 if that turn was right, else with 0.3, less half a point for each slip elsewhere. Only the outcome is
seen; in `lines` each turn writes a line, too, which is kept with 0.9, at the bad turn with 0.3 if it was wrong, elsewhere with half a
point less. Batches of sixteen episodes of
different people go through the product's own credit and baseline. The bad turn is fixed at a chance of 0.75; a run has failed if by then
the mean KL of the others exceeds `--drift` nats, or after `--most` episodes. "episodes" is the median over seeds at the best of the step
sizes at which all seeds are fixed; "-" if there is none.

In `hints` a fifth of the failures get a comment, which in 90% names the bad turn and its right action, else any turn and action; whoever
reads it obeys with 0.8. The product chooses which comments are hints; the term's gradient is written out here (`benchmarks.reward.hints`
has the trainer's).

In `belief` the probability of the known answer is read after each turn, with an error of `sd`, and `BeliefWeighted` divides each episode's
credit by its changes: `asked now` falls from 0.9 to 0.3 where the bad turn was wrong; `forecast` is the chance of success, which is low
before the bad turn and hardly falls there. In `suspects` each of the first failures is sampled anew eight times from one turn on, that of
the largest fall of such a belief (sd 0.1, asked now) or any turn; `GroupRelative` credits it. A continuation costs the turns behind it.

The rows of `value` credit a turn with V(next prompt) - V(its prompt), and what comes later times lambda per turn (generalised advantage
estimation), V being the product's baseline. In "prompts repeat" a prompt tells the turn and whether the last action was right, so that V
is learned of each; otherwise each prompt is new, as prompts of real sessions are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmarks.contender import RESULTS
from numpy.typing import NDArray

from ostinato.core.errors import NoSignal
from ostinato.core.records import Reward, Row, Turn
from ostinato.core.samples import Episode, Sample
from ostinato.core.seams import Credit
from ostinato.core.verdicts import continuation_name
from ostinato.reward.baseline import Baseline, context_of
from ostinato.reward.config import HintsConfig, RewardConfig
from ostinato.reward.credit import BeliefWeighted, GroupRelative, SingleRollout, episode_returns
from ostinato.reward.hints import FRAME, HintSource
from ostinato.reward.line_credit import TurnLines
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

EPISODES, ACTIONS, GOAL = 16, 4, 0.75
CONTINUED = 8  # how often a failure is sampled anew
SHARE, RIGHT, OBEYED = (
    0.2,
    0.9,
    0.8,
)  # of failures with a comment, of comments about the bad turn, of answers that follow one
FIRST_ACTION = 48  # the token of the first action
SIZES = [4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Credits = Callable[[int, Ints, NDArray[np.bool_]], Floats]
"""Batch number, right or not of each episode's turns, and the outcomes -> each turn's advantage."""


class Policy:
    """A softmax over actions at each of N turns, with weights that all share."""

    def __init__(self, turns: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        own = rng.normal(size=(turns, 160))
        own /= np.linalg.norm(own, axis=1, keepdims=True)
        self._features_NF = np.concatenate([np.full((turns, 1), 0.1), own * np.sqrt(1 - 0.1**2)], axis=1)
        self.bad = int(rng.integers(turns))
        wanted_NA = np.full((turns, ACTIONS), np.log(0.1 / 3))
        wanted_NA[:, 0] = np.log(0.9)
        wanted_NA[self.bad] = np.log([0.1, 0.7, 0.1, 0.1])
        self._weights_FA = np.linalg.lstsq(self._features_NF, wanted_NA, rcond=None)[0]
        self._first_NA = self.odds()

    def odds(self) -> Floats:
        """Of each action at each turn."""
        logits_NA = self._features_NF @ self._weights_FA
        found_NA = np.exp(logits_NA - logits_NA.max(1, keepdims=True))
        return found_NA / found_NA.sum(1, keepdims=True)

    def drift(self) -> float:
        """The mean KL of all turns but the bad one, from what they were."""
        kl_N = (self._first_NA * np.log(self._first_NA / self.odds())).sum(1)
        return float(np.delete(kl_N, self.bad).mean())

    def step(self, actions_EN: Ints, advantages_EN: Floats, size: float, comments: Comments, weight: float) -> None:
        """One step along the policy gradient, and the gradient of the divergence from what is said behind each comment that is a hint."""
        odds_NA = self.odds()
        slopes_ENA = advantages_EN[:, :, None] * (np.eye(ACTIONS)[actions_EN] - odds_NA)
        turns = {(e, n): a_turn(f"{e}-{n}:0", prompt=(n, 0), sampled=(7,)) for e, n in comments}
        for hint in asyncio.run(hints_of(turns, advantages_EN, comments, weight)) if comments else ():
            e, n = map(int, hint.turn.id.removesuffix(":0").split("-"))
            named = np.eye(ACTIONS)[hint.hinted[1] - FIRST_ACTION]
            obeyed_A = OBEYED * named + (1 - OBEYED) / (ACTIONS - 1) * (1 - named)
            if obeyed_A[actions_EN[e, n]] < odds_NA[n, actions_EN[e, n]]:  # the trainer's gate
                slopes_ENA[e, n] += hint.advantages[0] * (obeyed_A - odds_NA[n])
        self._weights_FA += size * self._features_NF.T @ slopes_ENA.mean(0)


class ActionTokens:
    """A comment is the name of an action, one token at the end of the prompt."""

    def hinted_ids(self, turn: Turn, note: str) -> Sequence[int]:
        """The token before the prompt's last one."""
        action = int(note.removeprefix(FRAME.partition("{}")[0])[0])
        return *turn.prompt_ids[:-1], FIRST_ACTION + action, turn.prompt_ids[-1]

    def said_between(self, turn: Turn, following: Turn) -> str:
        """Nothing: there are only comments."""
        del turn, following
        return ""


Comments = Mapping[tuple[int, int], int]
"""The action that somebody names, by episode and turn."""


def comments_on(
    done_E: NDArray[np.bool_], bad: int, right_N: Ints, share: float, right: float, rng: np.random.Generator
) -> Comments:
    """A share of the failures gets a comment: with the chance `right` it names the bad turn and its right action, else any."""
    found: dict[tuple[int, int], int] = {}
    for episode in np.flatnonzero(~done_E).tolist():
        if rng.random() >= share:
            continue
        if rng.random() < right:
            found[episode, bad] = int(right_N[bad])
        else:
            found[episode, int(rng.integers(len(right_N)))] = int(rng.integers(ACTIONS))
    return found


async def hints_of(
    turns: Mapping[tuple[int, int], Turn], advantages_EN: Floats, comments: Comments, weight: float
) -> list[Sample]:
    """The hints of a batch, found by the product in a log of these comments on these turns."""
    log, rows, samples = MemoryLog(), list[Row](), list[Sample]()
    for at, action in comments.items():
        turn = turns[at]
        said = replace(a_signal(turn, "rejected"), comment=str(action))
        rows += [said, Reward(turn=turn.id, value=-1.0, function="f@1", signals=(said.id,), at=2.0)]
        samples.append(Sample(turn=turn, reward=0.0, advantages=(float(advantages_EN[at]),)))
    await log.append(*rows)
    source = HintSource(log, RewardConfig(hints=HintsConfig(weight=weight)), ActionTokens())
    credits = {sample.turn.id: sample.advantages for sample in samples}
    named = await source.hints([sample.turn for sample in samples], credits, dict.fromkeys(credits, 1.0))
    return await source.samples(samples, named)


class Batches:
    """The same records for every batch: only rewards differ, and prompts where these are to repeat or be new."""

    def __init__(self, turns: int) -> None:
        self.episodes = [
            Episode(id=f"e{e}", tenant="default", turns=tuple(self._turn(e, n) for n in range(turns)))
            for e in range(EPISODES)
        ]

    def _turn(self, episode: int, number: int) -> Turn:
        return a_turn(f"{episode}-{number}:0", user=f"u{episode}", prompt=(number,), sampled=(7,))

    def prompted(self, of: Callable[[int, int], Sequence[int]]) -> list[Episode]:
        """With the prompts that `of` gives for an episode and a turn."""
        return [
            Episode(
                id=each.id,
                tenant=each.tenant,
                turns=tuple(
                    a_turn(turn.id, user=turn.user, prompt=of(e, n), sampled=(7,)) for n, turn in enumerate(each.turns)
                ),
            )
            for e, each in enumerate(self.episodes)
        ]


def single(turns: int, *, discount: float, outcome: bool, repeat: bool, bad: int | None = None) -> Credits:
    """People's credit with its learned baseline."""
    config = RewardConfig(discount=discount, user_cap=1.0, user_steps=0)
    baseline, batches, rng = Baseline(), Batches(turns), np.random.default_rng(99)

    def credits(number: int, right_EN: Ints, done_E: NDArray[np.bool_]) -> Floats:
        episodes = batches.episodes if repeat else batches.prompted(lambda e, n: (number, e, n))
        last = {each.turns[-1].id for each in episodes}
        values = {turn.id: 0.0 for each in episodes for turn in each.turns}
        values |= {each.turns[-1].id: float(done) for each, done in zip(episodes, done_E, strict=True)}
        told: dict[str, TurnLines] = {}
        if bad is not None:
            kept_EN = rng.random(right_EN.shape) < np.where(
                right_EN, 0.9, np.where(np.arange(turns) == bad, 0.3, 0.895)
            )
            values = {
                turn.id: float(kept_EN[e, n]) for e, each in enumerate(episodes) for n, turn in enumerate(each.turns)
            }
            told = {turn: TurnLines(mean=value, lines=1, known=((0, value),)) for turn, value in values.items()}
        reach = last if outcome else set[str]()
        found = SingleRollout(config, baseline, lines=told, outcomes=reach)(episodes, values)
        for each in episodes:
            ids = [turn.id for turn in each.turns]
            rewards = [(values[turn], values[turn] if told else 0.0, int(bool(told))) for turn in ids]
            reached = episode_returns(ids, rewards, discount, outcomes=reach).turns
            for turn, value in zip(each.turns, reached, strict=True):
                baseline.observe(context_of(turn), value.total, 1, value.outcomes)
        return np.array([[found[turn.id][0] for turn in each.turns] for each in episodes])

    return credits


@dataclass(frozen=True)
class Belief:
    """The probability of the known answer after each turn, as far as a policy knows it: `before` the bad turn, else 0.9 or 0.3."""

    before: float
    sd: float  # of the error of each reading

    def changes(self, right_EN: Ints, bad: int, rng: np.random.Generator) -> Floats:
        """By episode and turn, the belief after the turn minus that before it."""
        episodes, turns = right_EN.shape
        after_EN = np.where(np.arange(turns) < bad, self.before, np.where(right_EN[:, [bad]], 0.9, 0.3))
        read_EN = np.concatenate([np.full((episodes, 1), self.before), after_EN], axis=1)
        return np.diff(np.clip(read_EN + rng.normal(0, self.sd, read_EN.shape), 0, 1), axis=1)


ASKED_NOW, FORECAST = 0.9, 0.36
READ = 1.1  # passes over an episode for a reading after each turn: what is new, as the rest is cached, and a tenth of a turn to ask


def in_group(turns: int) -> list[Episode]:
    """The episodes of a batch as one group."""
    return [Episode(id=each.id, tenant=each.tenant, turns=each.turns, group="g") for each in Batches(turns).episodes]


def graded(episodes: Sequence[Episode], done: Iterable[bool]) -> dict[str, float]:
    """By turn id: the outcome at the last turn of an episode, 0 elsewhere."""
    values = {turn.id: 0.0 for each in episodes for turn in each.turns}
    return values | {each.turns[-1].id: float(worth) for each, worth in zip(episodes, done, strict=True)}


def group(
    turns: int, *, bad: int = 0, belief: Belief | None = None, strength: float = 1.0, most: float = 8.0
) -> Credits:
    """Worlds' credit: the batch is one group; with a belief in the answer that is read after each turn."""
    episodes, rng = in_group(turns), np.random.default_rng(77)

    def credits(_: int, right_EN: Ints, done_E: NDArray[np.bool_]) -> Floats:
        credit: Credit = GroupRelative()
        if belief is not None:
            changes_EN = belief.changes(right_EN, bad, rng)
            changes = {
                turn.id: float(changes_EN[e, n]) for e, each in enumerate(episodes) for n, turn in enumerate(each.turns)
            }
            credit = BeliefWeighted(credit, changes, strength=strength, most=most)
        found = credit(episodes, graded(episodes, done_E))
        return np.array([[found[turn.id][0] for turn in each.turns] for each in episodes])

    return credits


def group_at_states(turns: int, bad: int) -> Credits:
    """The same with turns compared at equal prompts, which tell the turn and, from the bad one on, whether that was right."""
    batches = Batches(turns)

    def credits(_: int, right_EN: Ints, done_E: NDArray[np.bool_]) -> Floats:
        shown = batches.prompted(lambda e, n: (n, int(right_EN[e, bad]) if n > bad else 2))
        episodes = [Episode(id=each.id, tenant=each.tenant, turns=each.turns, group="g") for each in shown]
        found = GroupRelative(equal_states=True)(episodes, graded(episodes, done_E))
        return np.array([[found[turn.id][0] for turn in each.turns] for each in episodes])

    return credits


Learn = Callable[[int, Ints, Ints, NDArray[np.bool_], float], tuple[float, float]]
"""Batch number, actions, right or not, outcomes, step size: one step; returns how many episodes were generated beside, and the passes."""


def plain(make: Callable[[int], Credits], weight: float = 0.0, reads: float = 0.0) -> Callable[[Policy, int], Learn]:
    """A step by the credit of each turn. `weight`: of hints. `reads`: forward passes of each episode beside sampling and learning."""

    def learner(policy: Policy, seed: int) -> Learn:
        credits, rng = make(policy.bad), np.random.default_rng(seed + 2000)

        def learn(
            number: int, actions_EN: Ints, right_EN: Ints, done_E: NDArray[np.bool_], size: float
        ) -> tuple[float, float]:
            turns = actions_EN.shape[1]
            comments = comments_on(done_E, policy.bad, np.zeros(turns, np.int64), SHARE, RIGHT, rng) if weight else {}
            with contextlib.suppress(NoSignal):
                policy.step(actions_EN, credits(number, right_EN, done_E), size, comments, weight)
            return 0.0, EPISODES * (4 + reads) + 5 * len(comments) / turns

        return learn

    return learner


class Continued(NamedTuple):
    """A failure that is sampled anew from one turn: which episode, from where, all its actions, and the outcome."""

    episode: int
    at: int
    actions_N: Ints
    done: bool


def continued(
    odds_NA: Floats,
    actions_EN: Ints,
    done_E: NDArray[np.bool_],
    changes_EN: Floats | None,
    most: int,
    outcomes: Callable[[Ints], NDArray[np.bool_]],
    rng: np.random.Generator,
) -> list[Continued]:
    """The first `most` failures, each sampled anew eight times from the turn of the largest fall, or from any. `outcomes`: of actions."""
    found: list[Continued] = []
    for e in np.flatnonzero(~done_E)[:most].tolist():
        at = int(rng.integers(len(odds_NA))) if changes_EN is None else int(changes_EN[e].argmin())
        again_EN = drawn(odds_NA, CONTINUED, rng)
        again_EN[:, :at] = actions_EN[e, :at]
        found += [Continued(e, at, *each) for each in zip(again_EN, outcomes(again_EN).tolist(), strict=True)]
    return found


def credits_of_continued(
    whole: Sequence[Episode], done_E: NDArray[np.bool_], more: Sequence[Continued]
) -> list[Floats]:
    """The advantages of the turns of each episode, and of each that was sampled anew. Raises NoSignal."""
    episodes, done = list(whole), [*done_E.tolist(), *(each.done for each in more)]
    for number, (e, at, _, _) in enumerate(more):
        kept = tuple(replace(turn, id=f"{turn.id}~{number}") for turn in whole[e].turns[at:])
        episodes.append(replace(whole[e], id=continuation_name(f"e{e}", at, number), turns=kept))
    found = GroupRelative()(episodes, graded(episodes, done))
    return [np.array([found[turn.id][0] for turn in each.turns]) for each in episodes]


def suspects(
    turns: int, *, belief: Belief | None, failures: int, alone: bool = False
) -> Callable[[Policy, int], Learn]:
    """A step by credit in a group, whose first `failures` are sampled anew. `alone`: the group's own episodes are not learned from."""
    whole = in_group(turns)

    def learner(policy: Policy, seed: int) -> Learn:
        rng = np.random.default_rng(seed + 3000)

        def learn(
            number: int, actions_EN: Ints, right_EN: Ints, done_E: NDArray[np.bool_], size: float
        ) -> tuple[float, float]:
            del number
            changes_EN = None if belief is None else belief.changes(right_EN, policy.bad, rng)
            outcomes = partial(succeeded_by, policy.bad, rng)
            more = continued(policy.odds(), actions_EN, done_E, changes_EN, failures, outcomes, rng)
            generated = sum(turns - each.at for each in more) / turns
            read = 0.0 if belief is None else EPISODES * READ
            with contextlib.suppress(NoSignal):
                found = credits_of_continued(whole, done_E, more)
                advantages = np.zeros((len(found), turns))
                for e, own in enumerate(found):
                    if not alone or e >= EPISODES:
                        advantages[e, turns - len(own) :] = own
                rows = np.array([*actions_EN, *(each.actions_N for each in more)])
                policy.step(rows, advantages * len(found) / EPISODES, size, {}, 0.0)
            return generated, EPISODES * (1 if alone else 4) + 4 * generated + read

        return learn

    return learner


def succeeded_by(bad: int, rng: np.random.Generator, actions_EN: Ints) -> NDArray[np.bool_]:
    """The outcomes of these actions, the first of which is right everywhere."""
    return succeeded((actions_EN == 0).astype(np.int64), bad, rng)


def value(turns: int, *, trace: float, repeat: bool) -> Credits:
    """Generalised advantage estimation over turns, with the product's baseline as the value."""
    baseline, batches = Baseline(), Batches(turns)

    def credits(number: int, right_EN: Ints, done_E: NDArray[np.bool_]) -> Floats:
        def prompt(e: int, n: int) -> Sequence[int]:
            return (n, int(right_EN[e, n - 1]) if n else 1) if repeat else (number, e, n)

        episodes = batches.prompted(prompt)
        expected_EN = np.array([[baseline.predict(context_of(turn)) for turn in each.turns] for each in episodes])
        next_EN = np.concatenate([expected_EN[:, 1:], done_E[:, None].astype(float)], axis=1)
        found_EN, later_E = np.zeros_like(expected_EN), np.zeros(EPISODES)
        for n in range(turns - 1, -1, -1):
            later_E = next_EN[:, n] - expected_EN[:, n] + trace * later_E
            found_EN[:, n] = later_E
        for each, done in zip(episodes, done_E, strict=True):
            for turn in each.turns:
                baseline.observe(context_of(turn), float(done), 1)
        return found_EN / max(1e-8, float(np.sqrt((found_EN**2).mean())))

    return credits


def arms(turns: int) -> Mapping[str, Callable[[Policy, int], Learn]]:
    """Each way of giving credit. Only `lines`, `belief` and `suspects` use which turn is bad: to draw what is seen of it."""
    found = {
        "outcome, new prompts": plain(lambda _: single(turns, discount=0.9, outcome=True, repeat=False)),
        "outcome, equal states": plain(lambda _: single(turns, discount=0.9, outcome=True, repeat=True)),
        "outcome, in a group": plain(lambda _: group(turns)),
        "outcome, in a group, equal states": plain(lambda bad: group_at_states(turns, bad)),
        "rating, 0.9 a call": plain(lambda _: single(turns, discount=0.9, outcome=False, repeat=False)),
        "outcome, hints of weight 3": plain(lambda _: single(turns, discount=0.9, outcome=True, repeat=False), 3.0),
        "outcome, hints of weight 100": plain(lambda _: single(turns, discount=0.9, outcome=True, repeat=False), 100.0),
        "lines": plain(lambda bad: single(turns, discount=0.9, outcome=False, repeat=False, bad=bad)),
    }
    for name, before in (("asked now", ASKED_NOW), ("forecast", FORECAST)):
        for sd in (0.0, 0.05, 0.1, 0.2):
            found[f"belief, {name}, sd {sd:g}"] = plain(
                lambda bad, before=before, sd=sd: group(turns, bad=bad, belief=Belief(before, sd)), reads=READ
            )
    for strength, most in ((0.5, 8.0), (1.0, 3.0), (1.0, 32.0)):
        found[f"belief, asked now, sd 0.1, strength {strength:g}, most {most:g}"] = plain(
            lambda bad, strength=strength, most=most: group(
                turns, bad=bad, belief=Belief(ASKED_NOW, 0.1), strength=strength, most=most
            ),
            reads=READ,
        )
    seen = Belief(ASKED_NOW, 0.1)
    return found | {
        "suspects, by belief, 2 failures": suspects(turns, belief=seen, failures=2),
        "suspects, by belief, all failures": suspects(turns, belief=seen, failures=EPISODES),
        "suspects, by belief, all failures, alone": suspects(turns, belief=seen, failures=EPISODES, alone=True),
        "suspects, any turn, all failures": suspects(turns, belief=None, failures=EPISODES),
        "value, lambda 0, prompts repeat": plain(lambda _: value(turns, trace=0.0, repeat=True)),
        "value, lambda 0.9, prompts repeat": plain(lambda _: value(turns, trace=0.9, repeat=True)),
        "value, lambda 0.9, new prompts": plain(lambda _: value(turns, trace=0.9, repeat=False)),
    }


def drawn(odds_NA: Floats, episodes: int, rng: np.random.Generator) -> Ints:
    """Actions [E, N]."""
    return (rng.random((episodes, len(odds_NA), 1)) > odds_NA.cumsum(1)[None, :, :-1]).sum(2)


def succeeded(right_EN: Ints, bad: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """The outcomes of episodes, given which of their turns were right."""
    slips_E = right_EN.shape[1] - 1 - (right_EN.sum(1) - right_EN[:, bad])
    return rng.random(len(right_EN)) < np.where(right_EN[:, bad], 0.9, 0.3) - 0.005 * slips_E


class Fixed(NamedTuple):
    """What it took: episodes generated, passes over an episode, and the drift of the other turns."""

    episodes: int
    passes: float
    drift: float


def until_fixed(
    turns: int, make: Callable[[Policy, int], Learn], size: float, seed: int, drift: float, most: float
) -> Fixed | None:
    """None if the other turns drifted, or it took too long."""
    policy, rng = Policy(turns, seed), np.random.default_rng(seed + 1000)
    learn, episodes, passes, number = make(policy, seed), 0.0, 0.0, 0
    while episodes < most:
        if policy.drift() > drift:
            return None
        odds_NA = policy.odds()
        if odds_NA[policy.bad, 0] >= GOAL:
            return Fixed(round(episodes), passes, policy.drift())
        actions_EN = drawn(odds_NA, EPISODES, rng)
        right_EN = (actions_EN == 0).astype(np.int64)
        more, cost = learn(number, actions_EN, right_EN, succeeded(right_EN, policy.bad, rng), size)
        episodes, passes, number = episodes + EPISODES + more, passes + cost, number + 1
    return None


def best(
    turns: int, make: Callable[[Policy, int], Learn], seeds: int, drift: float, most: int
) -> tuple[list[Fixed], float]:
    """Each seed at the best step size, and that size; from the largest on, until two sizes are no better."""
    found, at, worse = list[Fixed](), 0.0, 0

    def middle(some: Sequence[Fixed]) -> float:
        return float(np.median([one.episodes for one in some]))

    for size in SIZES:
        limit = most if not found else min(most, 4 * middle(found))
        taken = list[Fixed]()
        for seed in range(seeds):
            one = until_fixed(turns, make, size, seed, drift, limit)
            if one is None:
                break
            taken.append(one)
        if len(taken) == seeds and (not found or middle(taken) < middle(found)):
            found, at, worse = taken, size, 0
        elif found and (worse := worse + 1) == 2:
            break
    return found, at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--drift", type=float, default=0.005, help="nats")
    parser.add_argument("--most", type=int, default=2048, help="episodes")
    parser.add_argument("--only", default="", help="the arms whose name begins so")
    parser.add_argument("--out", type=Path, default=RESULTS / "bad_turn.json")
    args = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    for name, make in arms(args.turns).items():
        if not name.startswith(args.only):
            continue
        found, size = best(args.turns, make, args.seeds, args.drift, args.most)
        rows[name] = {"runs": [each._asdict() for each in found], "step size": size}
        episodes = [each.episodes for each in found]
        middle = int(np.median(episodes)) if found else "-"
        cost = f"{np.median([each.passes for each in found]):.0f}" if found else "-"
        moved = f"{max(each.drift for each in found):.4f}" if found else "-"
        print(f"{name:<50}{middle:>6} {episodes}  passes {cost}, drift {moved}, step size {size:g}", flush=True)
    settings = {"seeds": args.seeds, "turns": args.turns, "drift": args.drift, "most": args.most}
    args.out.write_text(json.dumps(settings | {"arms": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
