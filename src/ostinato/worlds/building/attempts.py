"""Mutation testing of a package: mutates its functions in small batches and keeps mutations that make the same tests fail in two runs.

A function whose tests are too weak, because they pass with a trivial stub or with the function deleted, is left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from ostinato.worlds.building import filters, mutations
from ostinato.worlds.building.config import BuildConfig
from ostinato.worlds.building.runs import GreenSuite, SuiteJob, SuiteRun, SuiteRuns

# ---------------------------------------------------------------- stubs


_OF_TYPE: dict[str, tuple[str, ...]] = {
    "None": (),
    "bool": ("True", "False"),
    "str": ('""',),
    "int": ("0",),
    "list": ("[]",),
    "dict": ("{}",),
}
_ANY = ("True", "False", '""', "[]", "{}")
_LITERALS: tuple[tuple[type[cst.BaseExpression], str], ...] = (
    (cst.Comparison, "bool"),
    (cst.SimpleString, "str"),
    (cst.FormattedString, "str"),
    (cst.ConcatenatedString, "str"),
    (cst.List, "list"),
    (cst.ListComp, "list"),
    (cst.Dict, "dict"),
    (cst.DictComp, "dict"),
)


def _type_of(value: cst.BaseExpression | None) -> str:
    """Guess an expression's type from its syntax: a key of `_OF_TYPE`, or "" if unknown."""
    if value is None:
        return "None"
    if isinstance(value, cst.Name):
        return {"None": "None", "True": "bool", "False": "bool"}.get(value.value, "")
    if isinstance(value, cst.UnaryOperation) and isinstance(value.operator, cst.Not):
        return "bool"
    return next((name for kind, name in _LITERALS if isinstance(value, kind)), "")


class _ReturnVisitor(cst.CSTVisitor):
    """Collects the types that a body returns, and whether it yields. Nested functions and classes are skipped."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.yields = False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return False

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        return False

    def visit_Return(self, node: cst.Return) -> None:
        self.types.add(_type_of(node.value))

    def visit_Yield(self, node: cst.Yield) -> None:
        self.yields = True


def _required_parameters(function: cst.FunctionDef) -> list[str]:
    """Return the required positional parameters, except `self` and `cls`."""
    named = [*function.params.posonly_params, *function.params.params]
    return [each.name.value for each in named if each.default is None and each.name.value not in ("self", "cls")]


def _values(function: cst.FunctionDef) -> Iterator[str]:
    returned = _ReturnVisitor()
    function.body.visit(returned)
    yield "None"
    if returned.yields:
        if function.asynchronous is None:
            yield "iter(())"
        return
    types = returned.types - {"None"}
    annotation = function.returns.annotation if function.returns is not None else None
    annotation = annotation.value if isinstance(annotation, cst.Subscript) else annotation
    if types and isinstance(annotation, cst.Name) and annotation.value in _OF_TYPE:
        types = {annotation.value}
    yield from _ANY if "" in types else (value for each in sorted(types) for value in _OF_TYPE[each])
    if types:
        yield from _required_parameters(function)[:2]


def stubs(block: str) -> dict[str, str]:
    r"""Return trivial stubs of a function as {returned expression: the function's lines with that body}, "None" first.

    The expressions depend on the types that the real body returns. Raises ValueError if the lines are not one function.

    Example: ``stubs("def f(x):\n    return x > 1\n")["False"] == "def f(x):\n    return False\n"``
    """
    _, function = mutations.parse_block(block)
    return {value: mutations.with_body(block, [f"return {value}\n"]) for value in _values(function)}


# ---------------------------------------------------------------- weak tests


_WEAKNESS_MARGIN_SECONDS = 1.0  # CPU time; small, since a stub is either quick or hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedTests:
    """The tests to run for a function: those that enter it, and some others from the same files.

    `seconds`: their duration with the original function. `lazy`: the tests that failed with a stub returning None, as far as that run got;
    None if it recorded no failed test.

    Example: ``SelectedTests(function=function, tests=("test_a.py::test_b",), targets=("test_a.py",), seconds=0.1)``
    """

    function: mutations.Function
    tests: tuple[str, ...]
    targets: tuple[str, ...]
    seconds: float
    lazy: frozenset[str] | None = None


async def find_passing_stubs(
    runs: SuiteRuns, sources: Mapping[str, str], asked: Sequence[SelectedTests], bare: Mapping[str, frozenset[str]]
) -> list[str]:
    """Return for each function to be written a trivial stub that passes its tests, such as "return False"; "" if none was found.

    `bare`: function -> the tests that pass with the function deleted, for example because an inherited method takes its place.
    """
    found = [
        "nothing in its place" if bare.get(each.function.key, frozenset()).issuperset(each.tests) else ""
        for each in asked
    ]
    jobs = [
        (at, returns, job)
        for at, each in enumerate(asked)
        if not found[at]
        for returns, job in _jobs(each, sources[each.function.path], str(at))
    ]
    outcomes = await runs.run([job for *_, job in jobs], 0)
    for (at, returns, job), outcome in zip(jobs, outcomes, strict=True):
        if outcome is not None and outcome.code is not None and outcome.passed.issuperset(job.tests or ()):
            found[at] = f"return {returns}"
    return found


def _jobs(asked: SelectedTests, text: str, group: str) -> list[tuple[str, SuiteJob]]:
    """Return one job per stub. A job stops at its first failing test, and the group stops at the first stub that passes."""
    function, tests = asked.function, asked.tests
    known = asked.lazy is None or not asked.lazy.isdisjoint(tests)  # "return None" was tried before and does not pass
    jobs: list[tuple[str, SuiteJob]] = []
    for returns, block in stubs(function.block(text)).items():
        if known and returns == "None":
            continue
        job = SuiteJob(
            id=f"{function.key} {returns}", targets=_files(tests), tests=tests, edits={function.path: function.replaced(text, block)},
            most_failing=0, seconds=2 * asked.seconds + _WEAKNESS_MARGIN_SECONDS, group=group,
        )  # fmt: skip
        jobs.append((returns, job))
    return jobs


# ---------------------------------------------------------------- attempts


_NOTHING = filters.NoticedTests(fail_to_pass=(), pass_to_pass=())
_MARGIN_SECONDS = 2.0  # CPU time for a run's overhead and for a slower mutation


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One mutation of one function, and its fate.

    `block`: the text that replaces the function. `detail`: the kind of bug or, for weak tests, the stub that passes them.

    Example: ``Attempt(function="calc.py::add", kind=TaskKind.BUG, detail="arithmetic", block="def add(a, b): ...", fate=ChangeFate.VALID)``
    """

    function: str
    kind: filters.TaskKind
    detail: str
    block: str
    fate: filters.ChangeFate
    noticed: filters.NoticedTests = field(default=_NOTHING)


def select(function: mutations.Function, baseline: GreenSuite, beside: int) -> SelectedTests | None:
    """Select the tests to run for a function, with up to `beside` tests that do not enter it. Return None if no test enters it."""
    entering = baseline.tests_of(function.path, function.first)
    if not entering:
        return None
    files, chosen = _files(entering), set(entering)
    others = [test for test in baseline.stable if test not in chosen and test.split("::")[0] in files]
    others.sort(key=lambda test: baseline.seconds.get(test, 0.0))
    chosen |= set(others[:beside])
    tests = tuple(test for test in baseline.stable if test in chosen)
    return SelectedTests(function=function, tests=tests, targets=files, seconds=baseline.seconds_of(tests))


def _files(tests: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(test.split("::")[0] for test in tests))


class Attempts:
    """Mutates one package's functions. `sources`: path -> text of the files that may be mutated; `files`: all files."""

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
        self._duplicates = filters.DuplicateCode(files)
        self._tests = filters.TestLines(files)

    def functions(self) -> list[mutations.Function]:
        """Return all functions that may be mutated, shuffled by the seed."""
        functions = [
            function for path, text in sorted(self.sources.items()) for function in mutations.functions_of(path, text)
        ]
        random.Random(self.config.seed).shuffle(functions)
        return functions

    def batches(self, done: frozenset[str]) -> Iterator[list[mutations.Function]]:
        """Yield the functions that are not done yet, in batches."""
        remaining = [function for function in self.functions() if function.key not in done]
        for at in range(0, len(remaining), self.config.batch):
            yield remaining[at : at + self.config.batch]

    def _changed(self, function: mutations.Function, block: str) -> dict[str, str] | None:
        """Return {path: text} of the file with the function replaced by `block`, or None if it does not compile."""
        text = function.replaced(self.sources[function.path], block)
        return {function.path: text} if mutations.compiles(text) else None

    def _job(self, selected: SelectedTests, edits: Mapping[str, str], most_failing: int | None) -> SuiteJob:
        return SuiteJob(
            id=selected.function.key, targets=selected.targets, tests=selected.tests, edits=edits, most_failing=most_failing,
            seconds=2 * selected.seconds + _MARGIN_SECONDS,
        )  # fmt: skip

    def _selections(self, functions: Sequence[mutations.Function]) -> tuple[list[SelectedTests], list[Attempt]]:
        """Return the selected tests of functions worth mutating, and attempts that record why the other functions are left out."""
        chosen: list[SelectedTests] = []
        left_out: list[Attempt] = []
        for function in functions:
            selected = select(function, self.baseline, self.config.beside)
            if selected is None:
                why = filters.ChangeFate.UNTESTED
            elif selected.seconds > self.config.selection_seconds:
                why = filters.ChangeFate.TOO_SLOW
            elif self._duplicates.leaks(function, self.sources[function.path]):
                why = filters.ChangeFate.LEAKS
            else:
                chosen.append(selected)
                continue
            left_out.append(_left_out(function, why))
        return chosen, left_out

    def _candidates(self, function: mutations.Function) -> list[tuple[filters.TaskKind, str, str]]:
        """Return candidate mutations of a function as (kind, detail, new lines)."""
        block = function.block(self.sources[function.path])
        found: list[tuple[filters.TaskKind, str, str]] = []
        if function.code_lines >= self.config.body_lines and not function.name.endswith("__doc__"):
            found += [
                (filters.TaskKind.REMOVAL, "", mutations.without_body(block)),
                (filters.TaskKind.DELETION, "", ""),
            ]
        if function.code_lines > 1:
            seed = self.config.seed * 1_000_003 + function.first
            found += [
                (filters.TaskKind.BUG, fault.kind, fault.block)
                for fault in mutations.faults(block, most=self.config.faults_tried, seed=seed)
            ]
        return found

    def _is_specified(self, kind: filters.TaskKind, function: mutations.Function) -> bool:
        if kind is filters.TaskKind.BUG:
            return True  # the solver can read the function
        entering = self.baseline.tests_of(function.path, function.first)
        return filters.is_specified(
            kind,
            function,
            map(self._tests.of, entering),
            lines_a_word=self.config.lines_a_word,
            undocumented_lines=self.config.undocumented_lines,
        )

    def _changes(
        self, needed: Sequence[SelectedTests]
    ) -> tuple[list[tuple[SelectedTests, Attempt, SuiteJob]], list[Attempt]]:
        """Return the mutations to run, with their jobs, and those left out because the prompt would say too little."""
        limit = int(self.config.most_failing * len(self.baseline.stable))
        open_: list[tuple[SelectedTests, Attempt, SuiteJob]] = []
        left_out: list[Attempt] = []
        for selected in needed:
            function = selected.function
            for kind, detail, block in self._candidates(function):
                change = Attempt(
                    function=function.key, kind=kind, detail=detail, block=block, fate=filters.ChangeFate.VALID
                )
                if not self._is_specified(kind, function):
                    left_out.append(replace(change, fate=filters.ChangeFate.SAYS_LITTLE))
                elif (edits := self._changed(function, block)) is not None:
                    open_.append((selected, change, self._job(selected, edits, limit)))
        return open_, left_out

    async def _probe_stubs(self, chosen: Sequence[SelectedTests]) -> tuple[list[SelectedTests], list[Attempt]]:
        """Run each function's tests with a stub that returns None. Return the functions for which a test fails, with those tests as `lazy`,
        and attempts that record the other functions as untested.

        Only tests that also pass when the selection runs by itself stay selected.
        """
        jobs: list[tuple[SelectedTests, SuiteJob]] = []
        for selected in chosen:
            block = selected.function.block(self.sources[selected.function.path])
            edits = self._changed(selected.function, mutations.returning_none(block))
            if edits is not None:
                jobs.append((selected, self._job(selected, edits, 0)))
        lazy = await self.runs.run([job for _, job in jobs], 0)
        needed = [
            (selected, outcome)
            for (selected, _), outcome in zip(jobs, lazy, strict=True)
            if _stub_is_detected(selected, outcome)
        ]
        known = {selected.function.key for selected, _ in needed}
        unneeded = [each.function for each in chosen if each.function.key not in known]
        left_out = [_left_out(function, filters.ChangeFate.UNTESTED) for function in unneeded]
        plain = await self.runs.run([self._job(selected, {}, None) for selected, _ in needed], 2)
        found: list[SelectedTests] = []
        for (selected, outcome), alone in zip(needed, plain, strict=True):
            passing = tuple(test for test in selected.tests if alone is not None and test in alone.passed)
            failing = frozenset(outcome.failed) if outcome is not None and (outcome.stopped or outcome.failed) else None
            # a change that takes twice as long counts as endless
            took = selected.seconds if alone is None else alone.cpu
            found.append(replace(selected, tests=passing, seconds=took, lazy=failing))
        return found, left_out

    async def try_batch(self, functions: Sequence[mutations.Function]) -> list[Attempt]:
        """Try the functions' changes. Returns every attempt, with its fate."""
        chosen, tried = self._selections(functions)
        needed, unneeded = await self._probe_stubs(chosen)
        tried += unneeded
        open_, untold = self._changes(needed)
        tried += untold
        first = await self.runs.run([job for *_, job in open_], 0)
        again: list[tuple[Attempt, SuiteJob, SelectedTests]] = []
        bare: dict[str, frozenset[str]] = {}
        for (selected, change, job), outcome in zip(open_, first, strict=True):
            noticed = filters.split_tests(selected.tests, outcome or SuiteRun())
            if change.kind is filters.TaskKind.DELETION and outcome is not None and outcome.code is not None:
                bare[change.function] = outcome.passed
            stable, most = len(self.baseline.stable), self.config.most_failing
            fate = filters.judge_run(outcome, noticed, stable=stable, most_failing=most, lazy=selected.lazy)
            if fate is filters.ChangeFate.VALID:
                fate = self._check_repeated(change, noticed, [each for each, *_ in again])
            if fate is filters.ChangeFate.VALID:
                again.append((replace(change, noticed=noticed), job, selected))
            else:
                tried.append(replace(change, fate=fate))
        second = await self.runs.run([job for _, job, _ in again], 1)
        reproduced: list[tuple[Attempt, SelectedTests]] = []
        for (change, _, selected), outcome in zip(again, second, strict=True):
            split = None if outcome is None or outcome.code is None else filters.split_tests(selected.tests, outcome)
            if split == change.noticed:
                reproduced.append((change, selected))
            else:
                tried.append(replace(change, fate=filters.ChangeFate.UNSTABLE, noticed=_NOTHING))
        return tried + await self._mark_weak(reproduced, bare)

    async def _mark_weak(
        self, reproduced: Sequence[tuple[Attempt, SelectedTests]], bare: Mapping[str, frozenset[str]]
    ) -> list[Attempt]:
        """Return the changes; those of functions to be written are marked as weak if a trivial stub passes their fail-to-pass tests.

        `bare` is as in `find_passing_stubs`.
        """
        asked: dict[tuple[str, tuple[str, ...]], SelectedTests] = {}
        for change, selected in reproduced:
            if change.kind is not filters.TaskKind.BUG:
                tests = change.noticed.fail_to_pass
                asked[change.function, tests] = replace(selected, tests=tests, seconds=self.baseline.seconds_of(tests))
        stubbed = await find_passing_stubs(self.runs, self.sources, list(asked.values()), bare)
        passing = dict(zip(asked, stubbed, strict=True))
        judged: list[Attempt] = []
        for change, _ in reproduced:
            cheap = passing.get((change.function, change.noticed.fail_to_pass), "")
            weak = bool(cheap) and change.kind is not filters.TaskKind.BUG
            judged.append(
                replace(change, fate=filters.ChangeFate.WEAK, noticed=_NOTHING, detail=cheap) if weak else change
            )
        return judged

    def _check_repeated(
        self, change: Attempt, noticed: filters.NoticedTests, kept: Sequence[Attempt]
    ) -> filters.ChangeFate:
        """Return TWICE if the function already has a task with the same failing tests, ENOUGH if it has enough bugs, else VALID."""
        of_function = [each for each in kept if each.function == change.function and each.kind is change.kind]
        if any(each.noticed.fail_to_pass == noticed.fail_to_pass for each in of_function):
            return filters.ChangeFate.TWICE
        enough = change.kind is filters.TaskKind.BUG and len(of_function) >= self.config.faults_kept
        return filters.ChangeFate.ENOUGH if enough else filters.ChangeFate.VALID


def _left_out(function: mutations.Function, why: filters.ChangeFate) -> Attempt:
    return Attempt(function=function.key, kind=filters.TaskKind.REMOVAL, detail="", block="", fate=why)


def _stub_is_detected(selected: SelectedTests, outcome: SuiteRun | None) -> bool:
    """Return True if the tests detect the stub: one does not pass, or the run does not complete."""
    if outcome is None or outcome.code is None:
        return True
    return bool(set(selected.tests) - outcome.passed)
