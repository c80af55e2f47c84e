"""Fits and checks a run's dials and styles: fits directions in logit space to the live version's own answers, checks them against a safety
suite, and checks styles against a suite of tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ostinato.adapt import safety
from ostinato.adapt.dials import prior_in_force
from ostinato.adapt.fit import ATTRIBUTES, FittedBasis, fit_basis, steerable
from ostinato.adapt.learner import Floats, Prior, Regression, names_hash
from ostinato.adapt.prior import Population, flat_prior
from ostinato.adapt.styles import Style, styles_of
from ostinato.app.gateway import open_embedded, protected_ids
from ostinato.app.numerics import compute
from ostinato.app.storage import Run, model_path, rows_of
from ostinato.app.suites import ONE_ANSWER, HeldOutWorld, TaskSuite, open_task_suite
from ostinato.app.worlds import GRADERS_IN_BOXES, open_harnesses
from ostinato.config import Config
from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import BadConfig, BadRequest, NotFound
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, Person, PolicyVersion, Sampling, SteeringBasis, Turn
from ostinato.core.report import ItemScore
from ostinato.core.seams import Engine
from ostinato.core.steering import Basis, DialPrior, Steered, Steering
from ostinato.core.weights import Snapshot, Weights
from ostinato.evaluate.runner import Attempted, SuiteRunner
from ostinato.evaluate.statistics import Spread, bounds, items_needed, paired_items, spread_of
from ostinato.evaluate.suites import Item
from ostinato.serve.calls.caller import with_style
from ostinato.serve.calls.conversations import AnswerParser
from ostinato.worlds.grading.grade import Grader
from ostinato.worlds.harness.harnesses import answered
from ostinato.worlds.tasks.task import Task

if TYPE_CHECKING:
    from ostinato.model.renderer import HFRenderer

_CONCURRENT = 128  # answers sampled at the same time
_LIKELY_EVERY = 8  # every eighth answer is used to find the likely tokens
_ROUND_SEED = 1_000_003  # distance between the seeds of two rounds of a check
OnProgress = Callable[[str, int, int], None]
"""Called with the current activity, how much of it is done, and the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """A private engine in this process that serves the live version; no gateway reaches it."""

    engine: Engine
    renderer: HFRenderer
    policy: PolicyVersion
    weights: Weights
    path: Path


@contextlib.asynccontextmanager
async def _live_engine(run: Run, version: PolicyVersion | None = None) -> AsyncGenerator[_Live]:
    """Serve `version`; None: the live one. Raises NotFound if there is none, BadConfig for a model without a chat template."""
    from ostinato.model.renderer import HFRenderer

    live = version or await run.follower.resolve("live")
    if live is None:
        raise NotFound("no version is live: start the run with `ostinato up` first")
    path = await asyncio.to_thread(model_path, run.config)
    renderer = HFRenderer(path)
    if not renderer.chats:
        raise BadConfig("model.source has no chat template, and dials are tried on messages: use a chat model")
    weights = await run.follower.fetch(live)
    engine = await open_embedded(run.config, path, renderer)
    await engine.start()
    try:
        await engine.load("live", Snapshot(policy=live, weights=weights))
        yield _Live(engine=engine, renderer=renderer, policy=live, weights=weights, path=path)
    finally:
        await engine.close()


# ---------------------------------------------------------------- fitting dials


async def fit_live(
    run: Run,
    prompts: Sequence[str],
    *,
    each: int,
    tokens: int,
    seed: int,
    on_progress: OnProgress,
    version: PolicyVersion | None = None,
    names: Sequence[str] | None = None,
) -> FittedBasis:
    """Fit a basis to a version (None: the live one) on `each` answers of at most `tokens` tokens to each prompt. Imports torch.

    `names`: the dials to make (see `fit_basis`). Writes nothing. Raises NotFound without a live version, BadConfig for a model
    without a chat template or if nothing can be steered.
    """
    from ostinato.model.config import backend
    from ostinato.model.load import build
    from ostinato.model.steering import mean_probabilities, score_features

    config = run.config
    async with _live_engine(run, version) as live:
        renderer = live.renderer
        asked = [tuple(renderer.chat(Conversation(messages=(Message(role=Role.USER, text=each),)))) for each in prompts]
        answers = await _answers(live.engine, asked, Sampling(max_tokens=tokens, seed=seed), each, on_progress)

    def fit() -> FittedBasis:
        model = build(live.path, compute(config), backend(config.model))(live.weights)
        pairs = [(asked[prompt], ids) for prompt, ids, _ in answers]
        tokens_M = steerable(mean_probabilities(model, pairs[::_LIKELY_EVERY]), protected_ids(config, renderer))
        features_NM = score_features(
            model, pairs, tokens_M, lambda done: on_progress("score features", done, len(pairs))
        )
        texts = [(renderer.decode(ids), finish is Finish.STOP) for _, ids, finish in answers]
        measured = {name: [measure(*answer) for answer in texts] for name, measure in ATTRIBUTES.items()}
        return fit_basis(features_NM, measured, [prompt for prompt, _, _ in answers], tokens_M, live.policy.hash, names)

    return await asyncio.to_thread(fit)


async def _answers(
    engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: Sampling, each: int, on_progress: OnProgress
) -> list[tuple[int, tuple[int, ...], Finish]]:
    """Sample answers; return the prompt's index, the token ids and the finish reason of each."""
    gate, done = asyncio.Semaphore(max(1, _CONCURRENT // each)), 0

    async def ask(number: int) -> list[tuple[int, tuple[int, ...], Finish]]:
        nonlocal done
        ids: list[list[int]] = [[] for _ in range(each)]
        ends = [Finish.ERROR] * each
        request = Generate(
            id=f"fit-{number}", slot="live", prompt_ids=prompts[number], sampling=sampling, n=each, cache_salt="fit"
        )
        async with gate:
            async for chunk in engine.generate(request):
                ids[chunk.index] += chunk.ids
                ends[chunk.index] = chunk.finish or ends[chunk.index]
        done += each
        on_progress("answers", done, each * len(prompts))
        return [(number, tuple(own), end) for own, end in zip(ids, ends, strict=True) if end.trainable and own]

    return [answer for some in await asyncio.gather(*map(ask, range(len(prompts)))) for answer in some]


# ---------------------------------------------------------------- checking dials


class Safety(StrEnum):
    """What a check has shown, at its level: SAFE: violations rise by at most the margin. UNSAFE: not SAFE, and they rise. OPEN: neither."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    OPEN = "not shown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """The rise of the share of violations over the base model's on the same prompts, with confidence bounds.

    `needed`: prompts needed to show an equally safe corner safe with a power of 80%, at the spread seen here.

    Example: ``Rise(rise=0.002, lower=-0.004, upper=0.008, prompts=4000, needed=3100, found=Safety.SAFE)``
    """

    rise: float
    lower: float
    upper: float
    prompts: int
    needed: int
    found: Safety


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCorner:
    """A checked corner, or a checked style with all dials at 0 (`style`).

    The bounds have a familywise error rate of `alpha` over all corners and styles, in `families` over all task families as well. `tokens`:
    mean length of its answers. `found`: UNSAFE if `whole` or any family is, else what `whole` shows.

    Example: ``CheckedCorner(corner=corner, whole=whole, families={"code": rise}, tokens=31.5, found=Safety.OPEN)``
    """

    corner: safety.Corner
    whole: Rise
    families: Mapping[str, Rise]
    tokens: float
    found: Safety
    style: Style | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BasisCheck:
    """The result of a check of a basis and of styles.

    `kept`: the basis without the `dropped` dials. `basis` and `kept` are None if only styles were checked. `base`: the base model's share
    of violations; `tokens`: the mean length of its answers. `corners`, `styles`: the last result of each. `families`: {task family: (the
    base model's share of violations, number of tasks)}. `small`: families with so few tasks that not even a rise in every task could be
    shown. `policy`: the version that answered.
    """

    basis: Basis | None
    kept: Basis | None
    dropped: tuple[str, ...]
    base: float
    corners: tuple[CheckedCorner, ...]
    styles: tuple[CheckedCorner, ...] = ()
    families: Mapping[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])
    small: tuple[str, ...] = ()
    tokens: float = 0.0
    policy: PolicyVersion | None = None

    @property
    def safe(self) -> bool:
        """True if nothing was dropped and every corner and style was shown to be safe."""
        return not self.dropped and all(each.found is Safety.SAFE for each in (*self.corners, *self.styles))


async def check_live(
    run: Run,
    basis: Basis | None,
    *,
    seed: int,
    on_progress: OnProgress,
    version: PolicyVersion | None = None,
    styles: Sequence[Style] = (),
) -> BasisCheck:
    """Check a basis for a version (None: the live one), and each of `styles` with all dials at 0, against `adapt.safety.suite`.

    The corners are: each dial at its limits, all dials at once, simulated people, and the real people whose answers the basis moved most. A
    dial that raises violations, over all tasks or in a family, is dropped, and the people are checked again without it.

    A private engine in this process samples the answers, because no caller of a gateway may set dials. Writes nothing. Imports torch.
    Raises BadConfig, before anything is sampled, without a suite, for tasks that are not single answers, and for a style that the chat
    template cannot show; NotFound without a live version, or if there is neither a basis for it nor a style.
    """
    found = _single_answers(run.config.adapt.safety.suite, "adapt.safety.suite", run.config)
    async with (
        _live_engine(run, version) as live,
        HeldOutWorld(config=run.config, url="", tasks=found.tasks).grading() as (_, grader),
    ):
        answers = _LiveAnswers(run.config, live, found, grader)
        answers.check_styles(styles)
        basis = basis or await _newest_basis(run, live.policy)
        if basis is None and not styles:
            raise NotFound(f"the log has no basis for {live.policy}, which is live: run `ostinato adapt fit` first")
        people = list[tuple[float, ...]]() if basis is None else await most_moved_people(run, basis)
        prior = flat_prior(0) if basis is None else await shared_prior(run, basis.names)
        return await _Check(run, live.policy, answers, basis, people, prior, styles, seed, on_progress).whole()


class _LiveAnswers:
    """A suite's tasks, answered by the live version with `steering` and in `style` (its prompt). Implements `TaskWorld` and `TaskSlot`.
    `steered`, `tokens`: how each answer of the last `scores` was steered, and its length.
    """

    def __init__(self, config: Config, live: _Live, found: TaskSuite, grader: Grader) -> None:
        self.steering: Steering | None = None
        self.style, self.steered, self.tokens = "", list[Steered](), list[int]()
        self._config, self._live, self._grader = config, live, grader
        self._tasks: Mapping[str, Task] = {task.id: task for task in found.tasks.tasks}
        self._single = open_harnesses(config)[ONE_ANSWER]
        self._runner = SuiteRunner(found.suite, self, config.evaluate.runner)

    def family(self, item: str) -> str:
        """Return the family of a task, by the task's id."""
        return self._tasks[item].family

    def check_styles(self, styles: Sequence[Style]) -> None:
        """Raise BadConfig if the model's chat template cannot show a task in one of the styles."""
        for style in styles:
            try:
                for task in self._tasks.values():
                    self._live.renderer.chat(_styled_task(task, style.text))
            except BadRequest as error:
                raise BadConfig(
                    f"the model's chat template cannot show the style {style.name!r}: {error}; take it out of "
                    "adapt.styles.prompts"
                ) from error

    async def scores(self, draws: int, seed: int) -> list[ItemScore]:
        """Sample and grade `draws` answers to each task."""
        self.steered, self.tokens = [], []
        return await self._runner.run("live", self._live.policy, range(draws), seed=seed)

    @contextlib.asynccontextmanager
    async def open(self, slot: str) -> AsyncGenerator[_LiveAnswers]:
        del slot
        yield self

    async def served(self) -> PolicyVersion | None:
        return self._live.policy

    def answers_per_call(self, item: Item) -> int:
        del item
        return self._config.evaluate.runner.samples_per_request

    async def tries(self, item: Item, seed: int, count: int) -> list[Attempted]:
        task, live = self._tasks[item.id], self._live
        conversation = _styled_task(task, self.style)
        heat = self._config.worlds.temperature if task.temperature is None else task.temperature
        request = Generate(
            id=f"check-{item.id}-{seed}",
            slot="live",
            prompt_ids=tuple(live.renderer.chat(conversation)),
            sampling=Sampling(max_tokens=task.tokens, temperature=heat, top_p=task.top_p, stop=task.stop, seed=seed),
            n=count,
            cache_salt="check",
            steering=self.steering,
        )
        began = time.monotonic()
        texts, ends, tokens = [""] * count, [Finish.ERROR] * count, [0] * count
        async for chunk in live.engine.generate(request):
            texts[chunk.index] += chunk.text
            tokens[chunk.index] += len(chunk.ids)
            if chunk.finish is not None:
                ends[chunk.index] = chunk.finish
                self.steered += [chunk.steered] if chunk.steered is not None else []
        seconds = time.monotonic() - began
        self.tokens += tokens
        return [self._attempted(task, conversation, text, end, seconds) for text, end in zip(texts, ends, strict=True)]

    def _attempted(self, task: Task, conversation: Conversation, text: str, end: Finish, seconds: float) -> Attempted:
        reading = AnswerParser(self._live.renderer.reader(conversation, task.id))
        reading.take(text, last=True)
        message = reading.message()
        rollout = answered(task, self._single, message, "length" if end is Finish.LENGTH else "stop")

        async def grade() -> float:
            return (await self._grader.grade(task, rollout)).value

        formed = bool(message.text) and end is Finish.STOP
        return Attempted(
            formed=formed, policies=(self._live.policy,), seconds=seconds, grade=grade, text=message.text or None
        )


class _Check:
    """One run of `check_live`."""

    def __init__(
        self,
        run: Run,
        policy: PolicyVersion,
        answers: _LiveAnswers,
        basis: Basis | None,
        people: Sequence[tuple[float, ...]],
        prior: Prior,
        styles: Sequence[Style],
        seed: int,
        on_progress: OnProgress,
    ) -> None:
        self._config, self._rules = run.config, run.config.adapt.safety
        self._policy, self._answers = policy, answers
        self._basis, self._people, self._prior, self._styles = basis, people, prior, styles
        self._seed, self._on_progress = seed, on_progress
        self._level, self._number, self._round = self._rules.alpha, 0, 0
        self._base, self._shares = list[ItemScore](), dict[str, tuple[float, int]]()
        self._corners = 1 + len(self._styles)
        if basis is not None:
            joint = len(safety.joint_signs(len(basis.names))) if self._rules.together else 0
            self._corners += 2 * len(basis.names) + joint + self._rules.drawn + len(people)

    async def whole(self) -> BasisCheck:
        """Check the styles and all corners, dropping dials until no corner of several dials is unsafe."""
        self._level = self._rules.alpha / max(1, self._corners - 1)
        await self._sample_base()
        tokens, basis = float(np.mean(self._answers.tokens)), self._basis
        steered = self._answers.steered
        styles = tuple([await self._check_style(style) for style in self._styles])
        corners, dropped = list[CheckedCorner](), list[str]()
        if basis is not None:
            features, counts = [each.features for each in steered], [each.tokens for each in steered]
            reach = safety.DialReach.of(features, counts, self._config.adapt.cap, Regression().strength)
            corners, dropped = await self._check_dials(basis, reach)
        return BasisCheck(
            basis=basis,
            kept=basis if basis is None or not dropped else safety.without_dials(basis, dropped),
            dropped=tuple(dropped),
            base=1.0 - sum(each.score for each in self._base) / len(self._base),
            corners=tuple(corners),
            styles=styles,
            families=self._shares,
            small=self._small(),
            tokens=tokens,
            policy=self._policy,
        )

    async def _check_dials(self, basis: Basis, reach: safety.DialReach) -> tuple[list[CheckedCorner], list[str]]:
        """Return the last result of each corner, and the dials that are dropped."""
        alone = [await self._check_corner(corner) for corner in safety.single_corners(basis, reach)]
        dropped = list(dict.fromkeys(each.corner.dial for each in alone if each.found is Safety.UNSAFE))
        while len(dropped) < len(basis.names):
            several = [await self._check_corner(corner) for corner in self._corners_of_several(basis, reach, dropped)]
            if not any(each.found is Safety.UNSAFE for each in several):
                return [*alone, *several], dropped
            dropped.append(_dial_to_drop(basis, reach, several))
            self._round += 1  # the remaining dials are tested on fresh answers
            await self._sample_base()
        return alone, dropped

    async def _sample_base(self) -> None:
        """Sample the base model's answers: all dials at 0."""
        self._base = await self._scores(None)
        self._shares = self._families()

    def _families(self) -> dict[str, tuple[float, int]]:
        """Return {family: (the base model's share of violations, number of tasks)}."""
        scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for each in self._base:
            scores[self._answers.family(each.item)][each.item].append(each.score)
        return {
            family: (1.0 - sum(sum(own) / len(own) for own in items.values()) / len(items), len(items))
            for family, items in scores.items()
        }

    def _small(self) -> tuple[str, ...]:
        """Return the families in which not even a rise in every task could be shown."""
        level = self._level / len(self._shares)
        return tuple(
            family
            for family, (_, count) in self._shares.items()
            if self._rise(np.ones(count), level).found is not Safety.UNSAFE
        )

    def _corners_of_several(self, basis: Basis, reach: safety.DialReach, dropped: Sequence[str]) -> list[safety.Corner]:
        """Return the corners of several dials: all at once, simulated and real people. Dropped dials are at 0."""
        names = basis.names
        kept = [number for number, name in enumerate(names) if name not in dropped]
        reach = reach.only(kept)
        joint = safety.joint_corners(safety.without_dials(basis, dropped), reach) if self._rules.together else []
        drawn = safety.drawn_corners(reach, self._prior.only(kept), self._rules.drawn, self._seed)
        found = [replace(each, dials=_with_zeros(each.dials, kept, len(names))) for each in (*joint, *drawn)]
        for number, dials in enumerate(self._people, 1):
            own = _with_zeros([dials[k] for k in kept], kept, len(names))
            found.append(safety.Corner(name=f"real person {number}", dials=own))
        return found

    async def _check_style(self, style: Style) -> CheckedCorner:
        self._answers.style = style.text
        found = await self._check_corner(safety.Corner(name=f"style {style.name}", dials=()))
        self._answers.style = ""
        return replace(found, style=style)

    async def _check_corner(self, corner: safety.Corner) -> CheckedCorner:
        scores = await self._scores(corner.dials or None)
        items, gains_I, _ = paired_items(scores, self._base)
        families = {
            family: np.array([self._answers.family(item) == family for item in items]) for family in self._shares
        }
        whole, level = self._rise(-gains_I, self._level), self._level / len(families)
        rises = {family: self._rise(-gains_I[own_I], level) for family, own_I in families.items()}
        unsafe = any(each.found is Safety.UNSAFE for each in (whole, *rises.values()))
        return CheckedCorner(
            corner=corner,
            whole=whole,
            families=rises,
            tokens=float(np.mean(self._answers.tokens)),
            found=Safety.UNSAFE if unsafe else whole.found,
        )

    def _rise(self, differences_I: Floats, level: float) -> Rise:
        spread, margin = spread_of(differences_I), self._rules.margin
        found = bounds(spread, lower_alpha=level, upper_alpha=level)
        lower = found.lower
        if spread.constant and spread.mean > 0:  # the exact bound alone shows less than if one prompt had risen less
            lower = max(lower, bounds(_with_pair(differences_I), lower_alpha=level, upper_alpha=level).lower)
        return Rise(
            rise=found.mean,
            lower=lower,
            upper=found.upper,
            prompts=found.n,
            needed=items_needed(spread, margin, alpha=level),
            found=Safety.SAFE if found.upper <= margin else Safety.UNSAFE if lower > 0 else Safety.OPEN,
        )

    async def _scores(self, dials: tuple[float, ...] | None) -> list[ItemScore]:
        """Sample and grade answers with these dials; None: all at 0."""
        adapt, basis, steering = self._config.adapt, self._basis, None
        if basis is not None:
            told = dials or (0.0,) * len(basis.names)
            steering = Steering(basis=basis, dials=told, cap=adapt.cap, budget=adapt.answer_budget)
        self._answers.steering = steering
        found = await self._answers.scores(self._rules.draws, self._seed + _ROUND_SEED * self._round)
        self._number += 1
        self._on_progress("corners", min(self._number, self._corners), self._corners)
        return found


def _dial_to_drop(basis: Basis, reach: safety.DialReach, several: Sequence[CheckedCorner]) -> str:
    """Choose the dial to drop if some corners of several dials are unsafe.

    If joint corners are unsafe: the dial with the largest contrast in violations over all joint corners (each has every dial equally far),
    in the families where they are unsafe. If only people are unsafe: the dial with the largest part in theirs.
    """
    joint = [each for each in several if each.corner.together]
    wrong = [each for each in joint if each.found is Safety.UNSAFE]
    if not wrong:
        return safety.most_moved(basis, reach, [each.corner for each in several if each.found is Safety.UNSAFE])
    families = {name for each in wrong for name, rise in each.families.items() if rise.found is Safety.UNSAFE}
    rises = [[each.families[name].rise for each in joint] for name in sorted(families)]
    if any(each.whole.found is Safety.UNSAFE for each in wrong):
        rises.append([each.whole.rise for each in joint])
    return safety.largest_contrast(basis, [each.corner for each in joint], np.array(rises))


def _with_pair(differences_I: Floats) -> Spread:
    """Return the spread of equal differences with two pseudo-items at +1 and -1, like `spread_of` with few unequal ones.

    (Bonett and Price 2012.) A corner that changes no prompt's rate makes all n rise from 0 to 1 with a probability of at most 4^-n, if
    answers are independent.
    """
    sample_I = np.append(differences_I, [1.0, -1.0])
    error = float(sample_I.std(ddof=1)) / sample_I.size**0.5
    mean, size = float(sample_I.mean()), sample_I.size
    return Spread(mean=mean, centre=mean, error=error, n=size, df=size - 1, constant=False)


# ---------------------------------------------------------------- styles


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStyle:
    """The check of a style: how much more it scores than no style on the same tasks, with confidence bounds at the corrected level.

    Example: ``CheckedStyle(style=style, gain=0.01, lower=-0.03, upper=0.05, tasks=200, passed=True)``
    """

    style: Style
    gain: float
    lower: float
    upper: float
    tasks: int
    passed: bool


async def check_styles(
    run: Run, *, seed: int, on_progress: OnProgress, version: PolicyVersion | None = None
) -> tuple[PolicyVersion, list[CheckedStyle]]:
    """Check each configured style with a version (None: the live one) against `adapt.styles.suite`. Also return the version.

    A style passes if it is shown to lose at most the margin (non-inferiority). The answers are sampled in this process, as in `check_live`.
    Writes nothing. Imports torch. Raises BadConfig without styles or a suite, for tasks that are not single answers, and for a model whose
    template takes no system prompt; NotFound without a live version.
    """
    config, rules = run.config, run.config.adapt.styles
    styles = styles_of(config.adapt)
    if not styles:
        raise BadConfig("there is no style to try: write them into adapt.styles.prompts")
    found = _single_answers(rules.suite, "adapt.styles.suite", config)
    async with (
        _live_engine(run, version) as live,
        HeldOutWorld(config=config, url="", tasks=found.tasks).grading() as (_, grader),
    ):
        answers, checked = _LiveAnswers(config, live, found, grader), list[CheckedStyle]()
        answers.check_styles(styles)
        base = await answers.scores(rules.draws, seed)
        for number, style in enumerate(styles, 1):
            on_progress("styles", number - 1, len(styles))
            answers.style = style.text
            gains_I = paired_items(await answers.scores(rules.draws, seed), base)[1]
            level = rules.alpha / len(styles)
            told = bounds(spread_of(gains_I), lower_alpha=level, upper_alpha=level)
            checked.append(
                CheckedStyle(
                    style=style,
                    gain=told.mean,
                    lower=told.lower,
                    upper=told.upper,
                    tasks=told.n,
                    passed=told.lower >= -rules.margin,
                )
            )
        on_progress("styles", len(styles), len(styles))
        return live.policy, checked


def _styled_task(task: Task, style: str) -> Conversation:
    """Return a task's messages with the prompt of a style."""
    continued = task.messages[-1].role is Role.ASSISTANT
    return with_style(Conversation(messages=task.messages, continued=continued), style)


def _with_zeros(dials: Sequence[float], kept: Sequence[int], count: int) -> tuple[float, ...]:
    """Return the settings of all `count` dials: `dials` at the indices `kept`, 0 elsewhere."""
    told = dict(zip(kept, dials, strict=True))
    return tuple(told.get(number, 0.0) for number in range(count))


def _single_answers(file: str, field: str, config: Config) -> TaskSuite:
    """Return the suite in a file, whose tasks must be single answers. Raises BadConfig, which names the setting `field`."""
    if not file:
        raise BadConfig(f"there is nothing to try with: name a task file in {field}")
    found = open_task_suite(file, config)
    for task in found.tasks.tasks:
        if task.harness != ONE_ANSWER:
            raise BadConfig(
                f"{field}: task {task.id!r} has the harness {task.harness!r}; single answers are tried, so leave it out"
            )
        if task.grading.grader in GRADERS_IN_BOXES:
            raise BadConfig(
                f"{field}: task {task.id!r} has the grader {task.grading.grader!r}; use one that reads the answer "
                "(checks, pattern, suggestion, rubric, your own)"
            )
    return found


async def _newest_basis(run: Run, live: PolicyVersion) -> Basis | None:
    """Return the newest basis that was fitted to the live version; None if there is none."""
    mine = [row async for row in rows_of(run.log, SteeringBasis) if row.weights == live.hash]
    return mine[-1].basis() if mine else None


async def shared_prior(run: Run, names: Sequence[str]) -> Prior:
    """Return the prior with which people of any tenant start now, if these are their dials."""
    population, newest, hashed = Population.flat(len(names)), None, names_hash(names)
    async for row in rows_of(run.log, DialPrior):
        if row.names == hashed:
            with contextlib.suppress(ValueError):  # ignore a damaged one
                population, newest = Population.read(row, len(names)), row
    return flat_prior(len(names)) if prior_in_force(newest, run.config.adapt) is None else population.shared


async def most_moved_people(run: Run, basis: Basis) -> list[tuple[float, ...]]:
    """Return the newest dials of the people whose answers have spent the most KL divergence on this basis."""
    spent, newest = defaultdict[Person, float](float), dict[Person, tuple[float, ...]]()
    most = run.config.adapt.safety.people
    if most:
        async for row in rows_of(run.log, Turn):
            if row.steered is not None and row.steered.basis == basis.hash:
                spent[row.person] += row.steered.kl
                newest[row.person] = row.steered.dials
    ranked = sorted(spent, key=lambda person: (-spent[person], person))
    return [newest[person] for person in ranked[:most] if spent[person] > 0]
