"""Finds functions whose tests are too weak: they pass with a stub, or with the function deleted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from ostinato.worlds.building.mutations.functions import Function
from ostinato.worlds.building.mutations.removal import parse_block, with_body
from ostinato.worlds.building.trying.runs import SuiteJob, SuiteRuns

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stub:
    r"""A function's lines with one trivial return statement as its body; `returns` is the returned expression.

    Example: ``Stub(returns="False", block="def f(x):\n    return False\n")``
    """

    returns: str
    block: str


def _type_of(value: cst.BaseExpression | None) -> str:
    """An expression's type as its syntax suggests: a key of `_OF_TYPE`, or "" if unknown."""
    if value is None:
        return "None"
    if isinstance(value, cst.Name):
        return {"None": "None", "True": "bool", "False": "bool"}.get(value.value, "")
    if isinstance(value, cst.UnaryOperation) and isinstance(value.operator, cst.Not):
        return "bool"
    return next((name for kind, name in _LITERALS if isinstance(value, kind)), "")


class _Answers(cst.CSTVisitor):
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


def _given(function: cst.FunctionDef) -> list[str]:
    """The required positional parameters, except `self` and `cls`."""
    named = [*function.params.posonly_params, *function.params.params]
    return [each.name.value for each in named if each.default is None and each.name.value not in ("self", "cls")]


def _values(function: cst.FunctionDef) -> Iterator[str]:
    answers = _Answers()
    function.body.visit(answers)
    yield "None"
    if answers.yields:
        if function.asynchronous is None:
            yield "iter(())"
        return
    types = answers.types - {"None"}
    stated = function.returns.annotation if function.returns is not None else None
    stated = stated.value if isinstance(stated, cst.Subscript) else stated
    if types and isinstance(stated, cst.Name) and stated.value in _OF_TYPE:
        types = {stated.value}
    yield from _ANY if "" in types else (value for each in sorted(types) for value in _OF_TYPE[each])
    if types:
        yield from _given(function)[:2]


def stubs(block: str) -> list[Stub]:
    """Trivial stubs for a function, doing nothing first. The choice depends on what the real body returns.

    Raises ValueError if the lines are not one function.
    """
    _, function = parse_block(block)
    return [Stub(returns=value, block=with_body(block, [f"return {value}\n"])) for value in _values(function)]


# ---------------------------------------------------------------- weak tests


_MARGIN_SECONDS = 1.0  # CPU time: a stub is either quick or hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTask:
    """A function to be written, and the tests that must then pass. They take `seconds` with the original function.

    `lazy` are tests that fail when the function does nothing, None if that run gave no failed test; `bare` are tests that pass without it.

    Example: ``FunctionTask(function=function, tests=("test_a.py::test_b",), seconds=0.1, lazy=frozenset(), bare=frozenset())``
    """

    function: Function
    tests: tuple[str, ...]
    seconds: float
    lazy: frozenset[str] | None
    bare: frozenset[str]


async def passing_for_nothing(runs: SuiteRuns, sources: Mapping[str, str], asked: Sequence[FunctionTask]) -> list[str]:
    """For each, a trivial stub that passes its tests, such as "return False"; "" if none was found."""
    found = ["nothing in its place" if each.bare.issuperset(each.tests) else "" for each in asked]
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


def _jobs(asked: FunctionTask, text: str, group: str) -> list[tuple[str, SuiteJob]]:
    """One job per stub. A job stops at its first failing test, and the group stops at the first stub that passes."""
    function, tests = asked.function, asked.tests
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    known = asked.lazy is None or not asked.lazy.isdisjoint(tests)  # doing nothing has been tried and does not pass
    jobs: list[tuple[str, SuiteJob]] = []
    for stub in stubs(function.block(text)):
        if known and stub.returns == "None":
            continue
        job = SuiteJob(
            id=f"{function.key} {stub.returns}", targets=tuple(files), tests=tests,
            edits={function.path: function.replaced(text, stub.block)}, most_failing=0,
            seconds=2 * asked.seconds + _MARGIN_SECONDS, group=group,
        )  # fmt: skip
        jobs.append((stub.returns, job))
    return jobs
