"""Tries changes of a package's functions, a handful of functions at a time, and keeps those whose failing tests are sure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ostinato.worlds.building.config import BuildConfig
from ostinato.worlds.building.filters import Elsewhere, Fate, Noticed, TestLines, judge_first, says_enough, split_tests
from ostinato.worlds.building.mutations.bugs import faults
from ostinato.worlds.building.mutations.functions import Function, functions_of
from ostinato.worlds.building.mutations.removal import doing_nothing, without_body
from ostinato.worlds.building.trying.baseline import GreenSuite
from ostinato.worlds.building.trying.runs import SuiteJob, SuiteRun, SuiteRuns
from ostinato.worlds.building.weakness import Asked, passing_for_nothing
from ostinato.worlds.building.wording import TaskKind

_NOTHING = Noticed(fail_to_pass=(), pass_to_pass=())
_MARGIN_SECONDS = 2.0  # CPU: what a run takes beyond its tests, and a change may add


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One change of one function, and what became of it. `block` are the lines that stand in the function's place.

    `detail` is a bug's kind; where the tests are too weak, what passes them.

    Example: ``Attempt(function="calc.py::add", kind=TaskKind.BUG, detail="arithmetic", block="def add(a, b): ...", fate=Fate.VALID)``
    """

    function: str
    kind: TaskKind
    detail: str
    block: str
    fate: Fate
    noticed: Noticed = field(default=_NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The tests that are run for a function: those that enter it, and some beside them.

    `lazy` are tests that fail where it does nothing, the first if no more are known; None where they do not even end.

    Example: ``Selected(function=function, tests=("test_a.py::test_b",), targets=("test_a.py",), seconds=0.1)``
    """

    function: Function
    tests: tuple[str, ...]
    targets: tuple[str, ...]
    seconds: float
    lazy: frozenset[str] | None = None


def select(function: Function, baseline: GreenSuite, beside: int) -> Selected | None:
    """The tests to run for a function; None where none enters it."""
    entering = baseline.tests_of(function.path, function.first)
    if not entering:
        return None
    files = dict.fromkeys(test.split("::")[0] for test in entering)
    chosen = set(entering)
    others = [test for test in baseline.stable if test not in chosen and test.split("::")[0] in files]
    others.sort(key=lambda test: baseline.seconds.get(test, 0.0))
    chosen |= set(others[:beside])
    tests = tuple(test for test in baseline.stable if test in chosen)
    return Selected(
        function=function,
        tests=tests,
        targets=tuple(files),
        seconds=sum(baseline.seconds.get(test, 0.0) for test in tests),
    )


class Attempts:
    """Tries one package's functions. `sources` are the files that may change: path -> text.

    Example: ``async for key, tried in Attempts(runs, baseline, sources, files, config).work(done=set()): ...``
    """

    def __init__(
        self,
        runs: SuiteRuns,
        baseline: GreenSuite,
        sources: Mapping[str, str],
        files: Mapping[str, bytes],
        config: BuildConfig,
    ) -> None:
        self.runs = runs
        self.baseline = baseline
        self.sources = sources
        self.config = config
        self._elsewhere = Elsewhere(files)
        self._tests = TestLines(files)

    def functions(self) -> list[Function]:
        """All that may be tried, shuffled by the seed."""
        found = [function for path, text in sorted(self.sources.items()) for function in functions_of(path, text)]
        random.Random(self.config.seed).shuffle(found)
        return found

    def batches(self, done: frozenset[str]) -> Iterator[list[Function]]:
        """The functions that are not done yet, a batch at a time."""
        left = [function for function in self.functions() if function.key not in done]
        for at in range(0, len(left), self.config.batch):
            yield left[at : at + self.config.batch]

    def _changed(self, function: Function, block: str) -> dict[str, str] | None:
        """The file with other lines in the function's place; None if Python cannot read it."""
        text = function.replaced(self.sources[function.path], block)
        try:
            compile(text, function.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return {function.path: text}

    def _job(self, selected: Selected, edits: Mapping[str, str], most_failing: int | None) -> SuiteJob:
        return SuiteJob(
            id=selected.function.key, targets=selected.targets, tests=selected.tests, edits=edits, most_failing=most_failing,
            seconds=2 * selected.seconds + _MARGIN_SECONDS,
        )  # fmt: skip

    def _selections(self, functions: Sequence[Function]) -> tuple[list[Selected], list[Attempt]]:
        """The functions worth a try, and the reasons for leaving out the others."""
        chosen: list[Selected] = []
        left_out: list[Attempt] = []
        for function in functions:
            selected = select(function, self.baseline, self.config.beside)
            if selected is None:
                why = Fate.UNTESTED
            elif selected.seconds > self.config.selection_seconds:
                why = Fate.TOO_SLOW
            elif self._elsewhere.leaks(function, self.sources[function.path]):
                why = Fate.LEAKS
            else:
                chosen.append(selected)
                continue
            left_out.append(Attempt(function=function.key, kind=TaskKind.REMOVAL, detail="", block="", fate=why))
        return chosen, left_out

    def _candidates(self, function: Function) -> list[tuple[TaskKind, str, str]]:
        """Changes of a function: kind, detail, its lines afterwards."""
        block = function.block(self.sources[function.path])
        found: list[tuple[TaskKind, str, str]] = []
        if function.code_lines >= self.config.body_lines and not function.name.endswith("__doc__"):
            found += [(TaskKind.REMOVAL, "", without_body(block)), (TaskKind.DELETION, "", "")]
        if function.code_lines > 1:
            seed = self.config.seed * 1_000_003 + function.first
            found += [
                (TaskKind.BUG, fault.kind, fault.block)
                for fault in faults(block, most=self.config.faults_tried, seed=seed)
            ]
        return found

    def _says_enough(self, kind: TaskKind, function: Function) -> bool:
        if kind is TaskKind.BUG:
            return True  # the function is there to be read
        entering = self.baseline.tests_of(function.path, function.first)
        return says_enough(
            kind,
            function,
            map(self._tests.of, entering),
            lines_a_word=self.config.lines_a_word,
            undocumented_lines=self.config.undocumented_lines,
        )

    def _changes(self, needed: Sequence[Selected]) -> tuple[list[tuple[Selected, Attempt, SuiteJob]], list[Attempt]]:
        """The changes to run, with their jobs, and those left out because nobody could know what to write."""
        limit = int(self.config.most_failing * len(self.baseline.stable))
        open_: list[tuple[Selected, Attempt, SuiteJob]] = []
        left_out: list[Attempt] = []
        for selected in needed:
            function = selected.function
            for kind, detail, block in self._candidates(function):
                change = Attempt(function=function.key, kind=kind, detail=detail, block=block, fate=Fate.VALID)
                if not self._says_enough(kind, function):
                    left_out.append(replace(change, fate=Fate.SAYS_LITTLE))
                elif (edits := self._changed(function, block)) is not None:
                    open_.append((selected, change, self._job(selected, edits, limit)))
        return open_, left_out

    async def _needed(self, chosen: Sequence[Selected]) -> tuple[list[Selected], list[Attempt]]:
        """The functions that some test needs, with tests that fail when they do nothing; only tests that pass on their own stay chosen."""
        jobs: list[tuple[Selected, SuiteJob]] = []
        for selected in chosen:
            block = selected.function.block(self.sources[selected.function.path])
            edits = self._changed(selected.function, doing_nothing(block))
            if edits is not None:
                jobs.append((selected, self._job(selected, edits, 0)))
        lazy = await self.runs.run([job for _, job in jobs], 0)
        needed = [
            (selected, outcome)
            for (selected, _), outcome in zip(jobs, lazy, strict=True)
            if _is_noticed(selected, outcome)
        ]
        known = {selected.function.key for selected, _ in needed}
        left_out = [
            Attempt(function=each.function.key, kind=TaskKind.REMOVAL, detail="", block="", fate=Fate.UNTESTED)
            for each in chosen
            if each.function.key not in known
        ]
        plain = await self.runs.run([self._job(selected, {}, None) for selected, _ in needed], 2)
        found: list[Selected] = []
        for (selected, outcome), alone in zip(needed, plain, strict=True):
            sure = tuple(test for test in selected.tests if alone is not None and test in alone.passed)
            failing = frozenset(outcome.failed) if outcome is not None and (outcome.stopped or outcome.failed) else None
            took = (
                selected.seconds if alone is None else alone.cpu
            )  # a change that takes twice as long is taken not to end
            found.append(replace(selected, tests=sure, seconds=took, lazy=failing))
        return found, left_out

    async def try_batch(self, functions: Sequence[Function]) -> list[Attempt]:
        """Every change that was tried, with its fate."""
        chosen, tried = self._selections(functions)
        needed, unneeded = await self._needed(chosen)
        tried += unneeded
        open_, untold = self._changes(needed)
        tried += untold
        first = await self.runs.run([job for *_, job in open_], 0)
        again: list[tuple[Attempt, SuiteJob, Selected]] = []
        bare: dict[str, frozenset[str]] = {}
        for (selected, change, job), outcome in zip(open_, first, strict=True):
            noticed = split_tests(selected.tests, outcome or SuiteRun())
            if change.kind is TaskKind.DELETION and outcome is not None and outcome.code is not None:
                bare[change.function] = outcome.passed
            stable, most = len(self.baseline.stable), self.config.most_failing
            fate = judge_first(outcome, noticed, stable=stable, most_failing=most, lazy=selected.lazy)
            if fate is Fate.VALID:
                fate = self._repeated(change, noticed, [each for each, *_ in again])
            judged = replace(change, fate=fate, noticed=noticed if fate is Fate.VALID else _NOTHING)
            if fate is Fate.VALID:
                again.append((judged, job, selected))
            else:
                tried.append(judged)
        second = await self.runs.run([job for _, job, _ in again], 1)
        sure: list[tuple[Attempt, Selected]] = []
        for (change, _, selected), outcome in zip(again, second, strict=True):
            same = (
                outcome is not None
                and outcome.code is not None
                and split_tests(selected.tests, outcome) == change.noticed
            )
            if same:
                sure.append((change, selected))
            else:
                tried.append(replace(change, fate=Fate.UNSTABLE, noticed=_NOTHING))
        return tried + await self._unless_weak(sure, bare)

    async def _unless_weak(
        self, sure: Sequence[tuple[Attempt, Selected]], bare: Mapping[str, frozenset[str]]
    ) -> list[Attempt]:
        """The changes again, refused where a function is to be written and something cheap passes its fail-to-pass tests.

        `bare` is function -> the tests that pass without it: those for which an inherited method does as well, for example.
        """
        asked = {
            (change.function, change.noticed.fail_to_pass): self._asked(change, selected, bare)
            for change, selected in sure
            if change.kind is not TaskKind.BUG
        }
        passing = dict(
            zip(asked, await passing_for_nothing(self.runs, self.sources, list(asked.values())), strict=True)
        )
        judged: list[Attempt] = []
        for change, _ in sure:
            cheap = passing.get((change.function, change.noticed.fail_to_pass), "")
            weak = bool(cheap) and change.kind is not TaskKind.BUG
            judged.append(replace(change, fate=Fate.WEAK, noticed=_NOTHING, detail=cheap) if weak else change)
        return judged

    def _asked(self, change: Attempt, selected: Selected, bare: Mapping[str, frozenset[str]]) -> Asked:
        tests = change.noticed.fail_to_pass
        return Asked(
            function=selected.function,
            tests=tests,
            seconds=sum(self.baseline.seconds.get(test, 0.0) for test in tests),
            lazy=selected.lazy,
            bare=bare.get(change.function, frozenset()),
        )

    def _repeated(self, change: Attempt, noticed: Noticed, kept: Sequence[Attempt]) -> Fate:
        """Whether the function has this task already, or enough of its kind."""
        of_function = [each for each in kept if each.function == change.function and each.kind is change.kind]
        if any(each.noticed.fail_to_pass == noticed.fail_to_pass for each in of_function):
            return Fate.TWICE
        return (
            Fate.ENOUGH if change.kind is TaskKind.BUG and len(of_function) >= self.config.faults_kept else Fate.VALID
        )


def _is_noticed(selected: Selected, outcome: SuiteRun | None) -> bool:
    """True if a test tells that the function does nothing: one fails, or the run does not come to its end."""
    if outcome is None or outcome.code is None:
        return True
    return bool(set(selected.tests) - outcome.passed)
