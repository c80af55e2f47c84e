"""Evaluates a candidate against its incumbents on all suites: the `Evals` seam.

Candidate, live and best are sampled anew for every candidate, on the same items and from the same seeds. Their draws are never reused for a
later candidate, because the draws by which a version was selected overestimate it. The anchor was not selected, so once it is neither live
nor best its draws serve several candidates. They are then not paired by seeds; at equal seeds, nine of ten answers differ from a
candidate's anyway, and the comparison's standard error grows only by a tenth to a fifth.

If sampling takes longer than training, `gate.share_draws` makes the best release share its draws as well, other draws than those by which
it was selected, also while live is that release or the anchor. The first candidate after a release is then compared with live's draws from
when it shipped, unless that took more than one look. These draws overestimate live, so a loss passes no more often. They are used once: if
they were kept until live is replaced, a lucky release would block all after it, and if they were redrawn after each block, only unlucky
draws would last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ostinato.core.errors import Corrupt
from ostinato.core.records import PolicyVersion
from ostinato.core.report import BarResult, Incumbent, Incumbents, ItemScore, Report, Verdict
from ostinato.evaluate.config import BarConfig, GateConfig
from ostinato.evaluate.gate import Match, Paired, Selection, bar_words, decide, judge_bar, pair_up, seed_of, select
from ostinato.evaluate.opinions import OpinionProbes
from ostinato.evaluate.pass_at_k import answer_diversity, pass_rates, sharpening
from ostinato.evaluate.statistics import draw_spread, mcnemar
from ostinato.evaluate.suites import Item, Suite

Scores = dict[tuple[str, int], ItemScore]
"""(item, draw) -> score."""

SHARED_ROUNDS = 10
"""The number of rounds that share a version's draws. Then it is sampled anew, so that neither luck nor a judge's error lasts."""
SHARPENING_CONFIDENCE = 0.998
"""Confidence of each interval of a sharpening: of a thousand candidates that lost nothing against an incumbent, at most one is reported
as a loss against it."""


class Runner(Protocol):
    """Produces scores: `runner.SuiteRunner`, or a fake."""

    suite: Suite

    async def run(
        self, slot: str, policy: PolicyVersion, draws: range, items: Sequence[Item] | None = None, *, seed: int = 0
    ) -> list[ItemScore]:
        """Return the scores of every item for each draw."""
        ...


class Evaluation:
    """The evaluation of candidates by the gate. Each call of `run` takes one look; after an EXTEND verdict, call it again.

    Args:
        runners: run the compared suites. A report names the first.
        bars: the quality bars; they refer to suites by name.
        aside: run the suites that only bars refer to, for the candidate alone.
        best_slot: where the best release is sampled if it is neither live nor the anchor.
        opinions: probes a candidate that may ship for sycophancy; None: no probes.

    `evidence` and `restore` carry unfinished draws through the ledger, so that a restarted worker continues where the killed one stopped.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        gate: GateConfig,
        *,
        bars: Sequence[BarConfig] = (),
        aside: Sequence[Runner] = (),
        candidate_slot: str = "candidate",
        best_slot: str = "best",
        opinions: OpinionProbes | None = None,
    ) -> None:
        self._runners, self._aside = tuple(runners), tuple(aside)
        self._gate, self._bars = gate, tuple(bars)
        self._candidate_slot, self._best_slot = candidate_slot, best_slot
        self._opinions = opinions
        self._judged = ("", -1)
        self._drawn: dict[tuple[str, str], Scores] = {}
        self._period = -1  # of `SHARED_ROUNDS` rounds
        self._shared: dict[tuple[str, str], Scores] = {}

    async def run(self, candidate: PolicyVersion, *, against: Incumbents) -> Report:
        """Sample the draws that each side lacks for the round's next look, and judge on equal numbers of draws.

        Raises:
            Unavailable, Conflict: the gateway could not serve the versions (see `SuiteRunner.run`).
        """
        if self._judged != (candidate.hash, against.round):
            self._begin(candidate, against)
        chosen = {runner.suite.name: self._select(runner.suite) for runner in (*self._runners, *self._aside)}
        slots = self._slots(candidate, against)
        draws = self._gate.next_draws(
            min(self._known_draws(runner.suite, hash) for runner in self._runners for hash in slots)
        )
        best = set() if against.best is None else {against.best.hash}
        if self._gate.share_draws:
            own = {candidate.hash} | ({against.live.hash} - {against.anchor.hash} - best)
        else:
            own = {candidate.hash, against.live.hash} | best
        for runner in self._runners:
            for policy, slot in slots.values():
                draw = self._draw if policy.hash in own else self._draw_shared
                await draw(runner, slot, policy, draws, chosen[runner.suite.name].items)
        for runner in self._aside:
            await self._draw(runner, self._candidate_slot, candidate, draws, runner.suite.items)
        paired = [
            pair for runner in self._runners for pair in self._pair(runner.suite, chosen, candidate, against, draws)
        ]
        report = decide(paired, self._judge_bars(candidate, draws), self._gate, self._match(candidate, against, draws))
        if draws > 1:
            report = replace(report, **self._coverage(candidate, against, draws))
        if self._opinions is None or report.verdict is not Verdict.SHIP:
            return report
        others = {name: (slots[policy.hash][1], policy) for name, policy in against.named().items()}
        shifts = await self._opinions.shifts((slots[candidate.hash][1], candidate), others)
        return replace(report, opinions=shifts)

    def evidence(self) -> dict[str, Any]:
        """Return the draws of the undecided round as JSON types.

        They are rows by suite and version: item, draw, score, whether the answer was well formed, seconds, and a hash of the answer.

        Example: ``{"candidate": "bb", "round": 3, "drawn": {"held-out:9f": {"bb": [["a", 0, 1.0, true, 0.4, "9f3c21aa"]]}}}``
        """
        drawn: dict[str, dict[str, list[list[Any]]]] = {}
        for (suite, policy_hash), scores in self._drawn.items():
            rows = [[s.item, s.draw, s.score, s.formed, s.seconds, s.answer] for s in scores.values()]
            drawn.setdefault(suite, {})[policy_hash] = rows
        return {"candidate": self._judged[0], "round": self._judged[1], "drawn": drawn}

    def restore(self, evidence: Mapping[str, Any]) -> None:
        """Restore what `evidence` returned.

        Evidence of other suites or items, or in the form of earlier versions, is ignored: what it lacks is drawn again from the same seeds.

        Raises:
            Corrupt: the evidence is malformed.
        """
        if "round" not in evidence:
            return
        try:
            self._judged = str(evidence["candidate"]), int(evidence["round"])
            self._drawn = {}
            for runner in (*self._runners, *self._aside):
                suite = runner.suite
                asked = {item.id for item in (suite if runner in self._aside else self._select(suite)).items}
                for policy_hash, rows in evidence["drawn"].get(_key(suite), {}).items():
                    scores = [_score(*row) for row in rows]
                    # if not, the settings that pick a round's items have changed, and some items would have more draws than others
                    if {score.item for score in scores} == asked:
                        self._keep(_key(suite), policy_hash, scores)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Corrupt(
                f"the ledger's evidence does not have the expected form ({error}); `ostinato ship` ships by hand"
            ) from error

    def scores(self, suite: Suite, policy: PolicyVersion) -> list[ItemScore]:
        """Return the scores of one version in this round."""
        return list(self._drawn.get((_key(suite), policy.hash), {}).values())

    def _begin(self, candidate: PolicyVersion, against: Incumbents) -> None:
        """Begin a candidate's first look, with no draws, or with those by which live was shipped (`gate.share_draws`)."""
        before, drawn, live = self._judged[0], self._drawn, against.live.hash
        self._judged, self._drawn = (candidate.hash, against.round), {}
        if not self._gate.share_draws or before != live:
            return
        for suite in (runner.suite for runner in self._runners):
            scores = drawn.get((_key(suite), live), {})
            first_look = range(self._gate.first_draws)
            wanted = [(item.id, draw) for item in self._select(suite).items for draw in first_look]
            if all(draw in first_look for _, draw in scores) and scores.keys() >= set(wanted):
                self._keep(_key(suite), live, [scores[each] for each in wanted])

    def _select(self, suite: Suite) -> Selection:
        return select(suite, self._gate, *self._judged)

    def _slots(self, candidate: PolicyVersion, against: Incumbents) -> dict[str, tuple[PolicyVersion, str]]:
        """Return the versions to sample and their slots, by hash. A version that plays two roles is sampled once."""
        slots = {Incumbent.LIVE: "live", Incumbent.ANCHOR: "control", Incumbent.BEST: self._best_slot}
        found = {candidate.hash: (candidate, self._candidate_slot)}
        for name, policy in against.named().items():
            found.setdefault(policy.hash, (policy, slots[name]))
        return found

    async def _draw(
        self, runner: Runner, slot: str, policy: PolicyVersion, draws: int, items: Sequence[Item]
    ) -> None:  # fmt: skip
        held = self._known_draws(runner.suite, policy.hash)
        if held < draws:
            seed = seed_of(runner.suite, *self._judged)
            found = await runner.run(slot, policy, range(held, draws), items, seed=seed)
            self._keep(_key(runner.suite), policy.hash, found)

    async def _draw_shared(
        self, runner: Runner, slot: str, policy: PolicyVersion, draws: int, items: Sequence[Item]
    ) -> None:  # fmt: skip
        """Draw what is missing of the version's shared draws of this period, and use them in this round."""
        period = self._judged[1] // SHARED_ROUNDS
        if self._period != period:
            self._period, self._shared = period, {}
        suite = runner.suite
        shared = self._shared.setdefault((_key(suite), policy.hash), {})
        wanted = range(self._known_draws(suite, policy.hash), draws)
        if lacking := [item for item in items if any((item.id, draw) not in shared for draw in wanted)]:
            seed = seed_of(suite, f"shared {policy.hash}", period)
            shared.update(_by_draw(await runner.run(slot, policy, wanted, lacking, seed=seed)))
        self._keep(_key(suite), policy.hash, [shared[item.id, draw] for item in items for draw in wanted])

    def _keep(self, suite: str, policy_hash: str, scores: Iterable[ItemScore]) -> None:
        known = self._drawn.setdefault((suite, policy_hash), {})
        for score in scores:
            known.setdefault((score.item, score.draw), score)

    def _known_draws(self, suite: Suite, policy_hash: str) -> int:
        """Return the number of known draws of a version; every item of the round has as many."""
        return 1 + max((draw for _, draw in self._drawn.get((_key(suite), policy_hash), {})), default=-1)

    def _first(self, suite: Suite, policy: PolicyVersion, draws: int) -> list[ItemScore]:
        return [score for score in self.scores(suite, policy) if score.draw < draws]

    def _pair(
        self, suite: Suite, chosen: Mapping[str, Selection], candidate: PolicyVersion, against: Incumbents, draws: int
    ) -> list[Paired]:  # fmt: skip
        others = {name: (policy, self._first(suite, policy, draws)) for name, policy in against.named().items()}
        return pair_up(suite.name, self._first(suite, candidate, draws), others, chosen[suite.name].sealed)

    def _judge_bars(self, candidate: PolicyVersion, draws: int) -> list[BarResult]:
        suites = {runner.suite.name: runner.suite for runner in (*self._runners, *self._aside)}
        found: list[BarResult] = []
        for bar in self._bars:
            suite = suites[bar.suite] if bar.suite else self._runners[0].suite
            found.append(judge_bar(bar, suite.name, self._first(suite, candidate, draws)))
        return found

    def _coverage(self, candidate: PolicyVersion, against: Incumbents, draws: int) -> dict[str, Any]:
        """Return the report's fields `pass_rates`, `sharpening`, `diversity` and `draw_spread`, on the first suite and with k = `draws`."""
        suite = self._runners[0].suite
        scores = self._first(suite, candidate, draws)
        found = (
            sharpening(
                scores, self._first(suite, policy, draws), draws, SHARPENING_CONFIDENCE, against=name, policy=policy
            )
            for name, policy in against.named().items()
        )
        return {
            "pass_rates": pass_rates(scores, draws),
            "sharpening": tuple(each for each in found if each is not None),
            "diversity": answer_diversity(scores, self._first(suite, against.anchor, draws), SHARPENING_CONFIDENCE),
            "draw_spread": draw_spread(self._first(suite, against.anchor, draws)),
        }

    def _match(self, candidate: PolicyVersion, against: Incumbents, draws: int) -> Match:
        suite = self._runners[0].suite
        return Match(
            suite=suite.name,
            suite_hash=suite.hash,
            candidate=candidate,
            incumbents=against,
            candidate_mean=_mean(self._first(suite, candidate, draws)),
            live_mean=_mean(self._first(suite, against.live, draws)),
        )


# ---------------------------------------------------------------- a training step


SMOKE_ITEMS = 16
"""The number of items of the first suite on which a training step is compared with live."""
SMOKE_ALPHA = 0.001
"""Level of that test: a step fails with all of 11 answers lost, or 14 of 15. It finds a broken step; worse steps are the gate's task."""


class StepCheck:
    """Tests whether a training step may serve the users who follow training: a smoke test against live, and the quality bars.

    There is no comparison within margins, so without bars it takes seconds. The arguments are those of `Evaluation`; `slot` serves the step
    under test. Sealed items of compared suites are left to the gate.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        gate: GateConfig,
        *,
        bars: Sequence[BarConfig] = (),
        aside: Sequence[Runner] = (),
        slot: str,
    ) -> None:
        self._first, self._slot = runners[0], slot
        self._gate, self._bars = gate, tuple(bars)
        self._barred = {runner.suite.name: runner for runner in (*aside, *runners)}
        self._compared = {runner.suite.name for runner in runners}
        self._live: tuple[str, Scores] = "", {}

    async def run(self, step: PolicyVersion, live: PolicyVersion) -> str:
        """Return why this step must not serve anybody; "" if it may. Raises as `SuiteRunner.run` does."""
        suite = self._first.suite
        few = self._gate.model_copy(update={"items_per_round": SMOKE_ITEMS})
        items, seed = _opened(select(suite, few, live.hash, 0)), seed_of(suite, live.hash, 0)
        found = _by_draw(await self._first.run(self._slot, step, range(1), items, seed=seed))
        if self._live[0] != live.hash:  # items and seeds are the same for every step compared with one live version
            self._live = live.hash, _by_draw(await self._first.run("live", live, range(1), items, seed=seed))
        if why := _smoke_failure(found, self._live[1]):
            return why
        for name in dict.fromkeys(bar.suite or suite.name for bar in self._bars):
            scores = await self._bar_scores(self._barred[name], step)
            for bar in self._bars:
                if (bar.suite or suite.name) == name and not (judged := judge_bar(bar, name, scores)).holds:
                    return f"a quality bar does not hold: {bar_words(judged)}"
        return ""

    async def _bar_scores(self, runner: Runner, step: PolicyVersion) -> list[ItemScore]:
        # a suite for bars alone is run whole, as in the gate: fewer items may prove too little
        items: Sequence[Item] = runner.suite.items
        if runner.suite.name in self._compared:
            items = _opened(select(runner.suite, self._gate, step.hash, 0))
        draws = range(self._gate.next_draws(0))
        return await runner.run(self._slot, step, draws, items, seed=seed_of(runner.suite, step.hash, 0))


def _opened(selection: Selection) -> list[Item]:
    return [item for item in selection.items if item.id not in selection.sealed]


def _by_draw(scores: Iterable[ItemScore]) -> Scores:
    return {(score.item, score.draw): score for score in scores}


def _smoke_failure(step: Scores, live: Scores) -> str:
    """Describe how a step fails where live, on the same items and seeds, does well; "" if that may be chance."""
    pairs = [(found, live[key]) for key, found in step.items() if key in live]
    gains = {
        "well formed": [float(one.formed) - float(other.formed) for one, other in pairs],
        "good": [one.score - other.score for one, other in pairs],
    }
    for what, gained_by in gains.items():
        gained, lost = sum(each > 0.0 for each in gained_by), sum(each < 0.0 for each in gained_by)
        if lost > gained and mcnemar(gained, lost) < SMOKE_ALPHA:
            return f"smoke test: of {len(pairs)} answers {lost} are less {what} than live's, and {gained} more"
    return ""


def _key(suite: Suite) -> str:
    """Return a suite's name and content hash: two files may hold the same items and be drawn differently."""
    return f"{suite.name}:{suite.hash}"


def _mean(scores: Sequence[ItemScore]) -> float:
    return sum(score.score for score in scores) / len(scores)


def _score(item: str, draw: int, score: float, formed: bool, seconds: float, answer: str = "") -> ItemScore:
    return ItemScore(
        item=item, draw=int(draw), score=float(score), formed=bool(formed), seconds=float(seconds), answer=str(answer)
    )
