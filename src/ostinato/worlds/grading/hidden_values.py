"""Seals tests: removes expected values from them, so that the code under test cannot read them there.

Tests share an interpreter with the code under test, which can read every frame, patch every function and write to every descriptor, so no
verdict and no expected value is safe there. A sealed test therefore decides nothing. ``assert f(3) == 9`` becomes
``witness.equal("5f0c", f(3))``: it reports the value to the grader outside, which alone knows that 9 is expected.

| claim in the test | what the sandbox still knows | what it takes to fake it |
|---|---|---|
| `x == 9`, `is None`, a local or a parameter with the expected value | that something is compared | the right value |
| `x == approx(0.3)` | the same | the right value, near enough |
| `with raises(ValueError, match="...")` | that something may be raised | the right error |
| `x == g(y)`: `PAIR` | both values; they are compared outside | reading the other side in the test's code |
| `x > 3`, `isinstance(x, T)`: `TRUTH` | a truth value, randomly negated in each grading | reading the test's bytecode |
| anything else that can fail | that it failed | patching the runner |
"""

from __future__ import annotations

import ast
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Place = tuple[int, int]
"""Line and column of a claim in the test's original source, the same in every grading."""

_TRUTHS: Mapping[str, type[ast.cmpop]] = {
    "assertNotEqual": ast.NotEq, "assertIs": ast.Is, "assertIsNot": ast.IsNot, "assertIn": ast.In, "assertNotIn": ast.NotIn,
    "assertGreater": ast.Gt, "assertGreaterEqual": ast.GtE, "assertLess": ast.Lt, "assertLessEqual": ast.LtE,
}  # fmt: skip
_EQUALS = {f"assert{kind}Equal" for kind in ("", "List", "Dict", "Tuple", "Set", "Sequence")} | {"assertEquals"}
_NEAR = (1e-6, 1e-12)  # pytest.approx's defaults


class Claim(StrEnum):
    """The kind of claim that a test makes about a value."""

    EQUAL = "equal"
    PAIR = "pair"
    TRUTH = "truth"
    RAISES = "raises"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One claim of a test, and the expected value, which only the grader knows.

    If `known`, the expected value is `value`; otherwise it is the value from the solution's run. `near`: relative and absolute tolerance.
    `flipped`: the reported truth value is negated. `errors`: names of exception classes, one of which must be raised with a message that
    `pattern` matches.

    Example: ``Site(place=(3, 4), claim=Claim.EQUAL, known=True, value=9)``
    """

    place: Place
    claim: Claim
    known: bool = False
    value: Any = None
    flipped: bool = False
    near: tuple[float, float] = (0.0, 0.0)
    errors: tuple[str, ...] = ()
    pattern: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedTests:
    """A test file without its expected values, and its sites by the keys under which it reports.

    Example: ``SealedTests(text="import _w5f ...", sites={"5f0c": site})``
    """

    text: str
    sites: Mapping[str, Site] = field(default_factory=dict[str, Site])


def seal(
    source: str, *, witness: str, drawn: random.Random, open_places: Collection[Place] = (), names: bool = True
) -> SealedTests:
    """Seal a test file.

    Args:
        source: its Python source.
        witness: the name of the module that reports to the grader; it must be unpredictable.
        drawn: the random generator for keys and for which truth values are negated.
        open_places: claims that the rehearsal found impossible to seal. They are left unchanged.
        names: also remove expected values from parameters and local variables. Only the solution's run then shows what they were.

    Raises SyntaxError.
    """
    tree = ast.parse(source)
    sealer = _Sealer(drawn, frozenset(open_places), names)
    tree = ast.fix_missing_locations(sealer.visit(tree))
    at = next((i for i, node in enumerate(tree.body) if not _stays_first(node)), len(tree.body))
    tree.body.insert(at, ast.Import(names=[ast.alias(name=witness, asname="_witness")]))
    return SealedTests(text=ast.unparse(ast.fix_missing_locations(tree)), sites=sealer.sites)


def _stays_first(node: ast.stmt) -> bool:
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


class _Sealer(ast.NodeTransformer):
    """Replaces claims by calls to the witness."""

    def __init__(self, drawn: random.Random, open_places: frozenset[Place], names: bool) -> None:
        self.sites: dict[str, Site] = {}
        self._drawn = drawn
        self._open = open_places
        self._names = names
        self._sealed: frozenset[str] = frozenset()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before = self._sealed
        if self._names and node.name.startswith("test"):
            self._sealed = frozenset(_blank(node, self._open))
        self.generic_visit(node)
        self._sealed = before
        return node

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return [self._sealed_claim(each) for each in _conjuncts(node.test)]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        claim = _unittest_claim(node.value)
        return self._sealed_claim(claim) if claim is not None else node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        for item in node.items:
            expected = _errors(item.context_expr)
            if expected is not None and _place(item.context_expr) not in self._open:
                site = Site(
                    place=_place(item.context_expr), claim=Claim.RAISES, errors=expected[0], pattern=expected[1]
                )
                item.context_expr = self._call("raises", site)
        return node

    def _sealed_claim(self, test: ast.expr) -> ast.stmt:
        """Return the statement that replaces a claim."""
        place = _place(test)
        if place in self._open:
            return ast.copy_location(ast.Assert(test=test), test)
        sides = _equal_sides(test)
        if sides is not None:
            for seen, expected in (sides, sides[::-1]):
                known = _literal(expected)
                if known is not None:
                    site = Site(place=place, claim=Claim.EQUAL, known=True, value=known[0], near=known[1])
                    return ast.Expr(self._call("equal", site, seen))
                if isinstance(expected, ast.Name) and expected.id in self._sealed:
                    return ast.Expr(self._call("equal", Site(place=place, claim=Claim.EQUAL), seen))
            if not _is_approximate(sides[0]) and not _is_approximate(sides[1]):
                return ast.Expr(self._call("pair", Site(place=place, claim=Claim.PAIR), *sides))
        flipped = self._drawn.random() < 0.5
        shown: ast.expr = ast.UnaryOp(op=ast.Not(), operand=test) if flipped else test
        return ast.Expr(self._call("truth", Site(place=place, claim=Claim.TRUTH, flipped=flipped), shown))

    def _call(self, method: str, site: Site, *arguments: ast.expr) -> ast.Call:
        key = f"{self._drawn.getrandbits(48):012x}"
        self.sites[key] = site
        function = ast.Attribute(value=ast.Name(id="_witness", ctx=ast.Load()), attr=method, ctx=ast.Load())
        return ast.Call(func=function, args=[ast.Constant(key), *arguments], keywords=[])


def _conjuncts(test: ast.expr) -> list[ast.expr]:
    """Return the claims that ``and`` joins."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _place(node: ast.expr) -> Place:
    return node.lineno, node.col_offset


def _equal_sides(test: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return both sides of ``a == b``, or of ``a is None`` and the like."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    right = test.comparators[0]
    constant = isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool))
    if isinstance(test.ops[0], ast.Eq) or (isinstance(test.ops[0], ast.Is) and constant):
        return test.left, right
    return None


def _literal(node: ast.expr) -> tuple[Any, tuple[float, float]] | None:
    """Return a literal's value with its relative and absolute tolerance, or None if the node is no literal."""
    near = (0.0, 0.0)
    if isinstance(node, ast.Call) and _is_approximate(node) and len(node.args) == 1:
        bounds = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
        if not set(bounds) <= {"rel", "abs"} or any(bound is None for bound in bounds.values()):
            return None
        relative, absolute = (bounds.get(name) for name in ("rel", "abs"))
        near = (
            relative[0] if relative else (0.0 if absolute else _NEAR[0]),
            absolute[0] if absolute else _NEAR[1],
        )  # fmt: skip
        node = node.args[0]
    try:
        return ast.literal_eval(node), near
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_approximate(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] == "approx"


def _dotted(node: ast.expr) -> str:
    """Return the dotted name ``a.b.c`` of a name or attribute, or "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def _unittest_claim(node: ast.expr) -> ast.expr | None:
    """Return the claim of ``self.assertEqual(a, b)`` and the like as an expression, or None for other nodes."""
    if not isinstance(node, ast.Call) or not _dotted(node.func).startswith("self.assert") or not node.args:
        return None
    name, arguments = _dotted(node.func)[5:], node.args
    claim: ast.expr | None = None
    if name in ("assertTrue", "assertFalse"):
        claim = arguments[0] if name == "assertTrue" else ast.UnaryOp(op=ast.Not(), operand=arguments[0])
    elif name in ("assertIsNone", "assertIsNotNone"):
        operator = ast.Is() if name == "assertIsNone" else ast.IsNot()
        claim = ast.Compare(left=arguments[0], ops=[operator], comparators=[ast.Constant(None)])
    elif len(arguments) >= 2 and (name in _EQUALS or name in _TRUTHS):
        operator = ast.Eq() if name in _EQUALS else _TRUTHS[name]()
        claim = ast.Compare(left=arguments[0], ops=[operator], comparators=[arguments[1]])
    return ast.copy_location(claim, node) if claim is not None else None


def _errors(node: ast.expr) -> tuple[tuple[str, ...], str | None] | None:
    """Return the exception classes that ``raises(...)`` names and its pattern, or None if the source does not show them."""
    if not isinstance(node, ast.Call) or _dotted(node.func) not in (
        "pytest.raises", "raises", "self.assertRaises", "self.assertRaisesRegex",
    ):  # fmt: skip
        return None
    arguments, pattern = list(node.args), None
    for keyword in node.keywords:
        if keyword.arg != "match":
            return None
        arguments.append(keyword.value)
    if len(arguments) == 2:
        if not isinstance(arguments[1], ast.Constant) or not isinstance(arguments[1].value, str):
            return None
        pattern = arguments[1].value
    if len(arguments) not in (1, 2):
        return None
    kinds = arguments[0].elts if isinstance(arguments[0], ast.Tuple) else [arguments[0]]
    names = tuple(_dotted(kind).rpartition(".")[2] for kind in kinds)
    return (names, pattern) if all(name[:1].isupper() for name in names) else None


# ---------------------------------------------------------------- expected values in variables and parameters


def _blank(function: ast.FunctionDef, open_places: frozenset[Place]) -> set[str]:
    """Blank the values of names that a test uses only as expected values in comparisons. Returns these names."""
    compared, elsewhere = _uses(function, open_places)
    only = compared - elsewhere
    return _blank_parameters(function, only) | _blank_locals(function, only)


def _uses(function: ast.FunctionDef, open_places: frozenset[Place]) -> tuple[set[str], set[str]]:
    """Return the names that are one whole side of an equality to be sealed, and the names that are used in another way."""
    compared: set[str] = set()
    bare: set[int] = set()
    for node in ast.walk(function):
        claims = _conjuncts(node.test) if isinstance(node, ast.Assert) else []
        if isinstance(node, ast.Expr) and (claim := _unittest_claim(node.value)) is not None:
            claims = [claim]
        for claim in claims:
            sides = _equal_sides(claim)
            if sides is None or _place(claim) in open_places:
                continue
            names = [side for side in sides if isinstance(side, ast.Name)]
            if len(names) == 1:  # with two names, either could be the expected value
                compared.add(names[0].id)
                bare.add(id(names[0]))
    loads = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return compared, {node.id for node in loads if id(node) not in bare}


def _blank_parameters(function: ast.FunctionDef, only: set[str]) -> set[str]:
    """Blank expected values in the rows of ``parametrize``. Returns the parameters' names."""
    blanked: set[str] = set()
    for call in function.decorator_list:
        if not isinstance(call, ast.Call) or not _dotted(call.func).endswith("mark.parametrize") or len(call.args) != 2:
            continue
        if any(keyword.arg != "ids" for keyword in call.keywords):
            continue
        named, rows = _literal(call.args[0]), call.args[1]
        if named is None or not isinstance(rows, ast.List | ast.Tuple):
            continue
        names: Sequence[str] = [n.strip() for n in named[0].split(",")] if isinstance(named[0], str) else list(named[0])
        cells = [_cells(row, len(names)) for row in rows.elts]
        if len(names) < 2 or any(row is None for row in cells):
            continue
        for column, name in enumerate(names):
            if name in only:
                blanked.add(name)
                for row in cells:
                    if row is not None:
                        row[column] = ast.Constant(None)
    return blanked


def _cells(row: ast.expr, width: int) -> list[ast.expr] | None:
    """Return a row's cells as a list to be modified in place, or None if there are not `width` plain cells."""
    if isinstance(row, ast.Tuple | ast.List):
        cells = row.elts
    elif isinstance(row, ast.Call) and _dotted(row.func).rpartition(".")[2] == "param":
        cells = row.args
    else:
        return None
    return cells if len(cells) == width and not any(isinstance(cell, ast.Starred) for cell in cells) else None


def _blank_locals(function: ast.FunctionDef, only: set[str]) -> set[str]:
    """Blank literals in assignments such as ``expected = [...]``. Returns the variables' names."""
    stored: dict[str, int] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored[node.id] = stored.get(node.id, 0) + 1
    blanked: set[str] = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        if name in only and stored[name] == 1 and _literal(node.value) is not None:
            node.value = ast.Constant(None)
            blanked.add(name)
    return blanked
