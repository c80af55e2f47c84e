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

The rows of `value` credit a turn with V(next prompt) - V(its prompt), and what comes later times lambda per turn (generalised advantage
estimation), V being the product's baseline. In "prompts repeat" a prompt tells the turn and whether the last action was right, so that V
is learned of each; otherwise each prompt is new, as prompts of real sessions are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.contender import RESULTS
from numpy.typing import NDArray

from ostinato.core.errors import NoSignal
from ostinato.core.records import Reward, Row, Turn
from ostinato.core.samples import Episode, Sample
from ostinato.reward.baseline import Baseline, context_of
from ostinato.reward.config import HintsConfig, RewardConfig
from ostinato.reward.credit import GroupRelative, SingleRollout, episode_returns
from ostinato.reward.hints import FRAME, HintSource
from ostinato.reward.line_credit import TurnLines
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

EPISODES, ACTIONS, GOAL = 16, 4, 0.75
SHARE, RIGHT, OBEYED = (
    0.2,
    0.9,
    0.8,
)  # of failures with a comment, of comments about the bad turn, of answers that follow one
FIRST_ACTION = 48  # the token of the first action
SIZES = [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]
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


def group(turns: int) -> Credits:
    """Worlds' credit: the batch is one group."""
    episodes = [
        Episode(id=each.id, tenant=each.tenant, turns=each.turns, group="g") for each in Batches(turns).episodes
    ]

    def credits(_: int, __: Ints, done_E: NDArray[np.bool_]) -> Floats:
        values = {turn.id: 0.0 for each in episodes for turn in each.turns}
        values |= {each.turns[-1].id: float(done) for each, done in zip(episodes, done_E, strict=True)}
        found = GroupRelative()(episodes, values)
        return np.array([[found[turn.id][0] for turn in each.turns] for each in episodes])

    return credits


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


def arms(turns: int) -> Mapping[str, Callable[[int], Credits]]:
    """Each way of giving credit, given which turn is bad, which only `lines` uses."""
    return {
        "outcome, new prompts": lambda _: single(turns, discount=0.9, outcome=True, repeat=False),
        "outcome, equal states": lambda _: single(turns, discount=0.9, outcome=True, repeat=True),
        "outcome, in a group": lambda _: group(turns),
        "rating, 0.9 a call": lambda _: single(turns, discount=0.9, outcome=False, repeat=False),
        "outcome, hints of weight 3": lambda _: single(turns, discount=0.9, outcome=True, repeat=False),
        "outcome, hints of weight 100": lambda _: single(turns, discount=0.9, outcome=True, repeat=False),
        "lines": lambda bad: single(turns, discount=0.9, outcome=False, repeat=False, bad=bad),
        "value, lambda 0, prompts repeat": lambda _: value(turns, trace=0.0, repeat=True),
        "value, lambda 0.9, prompts repeat": lambda _: value(turns, trace=0.9, repeat=True),
        "value, lambda 0.9, new prompts": lambda _: value(turns, trace=0.9, repeat=False),
    }


def episodes_until_fixed(
    turns: int, make: Callable[[int], Credits], size: float, seed: int, drift: float, most: int, weight: float
) -> int | None:
    """None if the other turns drifted, or it took too long. `weight`: of hints."""
    policy, rng = Policy(turns, seed), np.random.default_rng(seed + 1000)
    credits = make(policy.bad)
    for number in range(most // EPISODES):
        if policy.drift() > drift:
            return None
        odds_NA = policy.odds()
        if odds_NA[policy.bad, 0] >= GOAL:
            return number * EPISODES
        actions_EN = (rng.random((EPISODES, turns, 1)) > odds_NA.cumsum(1)[None, :, :-1]).sum(2)
        right_EN = (actions_EN == 0).astype(np.int64)
        slips_E = turns - 1 - (right_EN.sum(1) - right_EN[:, policy.bad])
        done_E = rng.random(EPISODES) < np.where(right_EN[:, policy.bad], 0.9, 0.3) - 0.005 * slips_E
        try:
            advantages_EN = credits(number, right_EN, done_E)
        except NoSignal:
            continue
        right_N = np.zeros(turns, np.int64)
        comments = comments_on(done_E, policy.bad, right_N, SHARE, RIGHT, rng) if weight else {}
        policy.step(actions_EN, advantages_EN, size, comments, weight)
    return None


def best(
    turns: int, make: Callable[[int], Credits], seeds: int, drift: float, most: int, weight: float
) -> tuple[list[int], float]:
    """The episodes of each seed at the best step size, and that size; from the largest on, until two sizes are no better."""
    found, at, worse = list[int](), 0.0, 0
    for size in SIZES:
        limit = most if not found else min(most, 4 * int(np.median(found)))
        taken = list[int]()
        for seed in range(seeds):
            one = episodes_until_fixed(turns, make, size, seed, drift, limit, weight)
            if one is None:
                break
            taken.append(one)
        if len(taken) == seeds and (not found or np.median(taken) < np.median(found)):
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
        weight = float(name.rpartition(" ")[2]) if "hints" in name else 0.0
        found, size = best(args.turns, make, args.seeds, args.drift, args.most, weight)
        rows[name] = {"episodes": found, "step size": size}
        print(f"{name:<36}{int(np.median(found)) if found else '-':>6}  {found}  step size {size:g}", flush=True)
    settings = {"seeds": args.seeds, "turns": args.turns, "drift": args.drift, "most": args.most}
    args.out.write_text(json.dumps(settings | {"arms": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
