"""Injects small faults into a function, such as people make, one at a time and with its formatting kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import libcst as cst

from ostinato.worlds.building.mutations.removal import WRAPPER, parse_block

_COMPARISONS: dict[type[cst.BaseCompOp], tuple[str, type[cst.BaseCompOp]]] = {
    cst.LessThan: ("boundary", cst.LessThanEqual),
    cst.LessThanEqual: ("boundary", cst.LessThan),
    cst.GreaterThan: ("boundary", cst.GreaterThanEqual),
    cst.GreaterThanEqual: ("boundary", cst.GreaterThan),
    cst.Equal: ("comparison", cst.NotEqual),
    cst.NotEqual: ("comparison", cst.Equal),
    cst.Is: ("comparison", cst.IsNot),
    cst.IsNot: ("comparison", cst.Is),
    cst.In: ("comparison", cst.NotIn),
    cst.NotIn: ("comparison", cst.In),
}
_ARITHMETIC: dict[type[cst.BaseBinaryOp], type[cst.BaseBinaryOp]] = {
    cst.Add: cst.Subtract,
    cst.Subtract: cst.Add,
    cst.Multiply: cst.FloorDivide,
    cst.FloorDivide: cst.Multiply,
    cst.Modulo: cst.FloorDivide,
    cst.LeftShift: cst.RightShift,
    cst.RightShift: cst.LeftShift,
    cst.BitAnd: cst.BitOr,
    cst.BitOr: cst.BitAnd,
}
_AUGMENTED: dict[type[cst.BaseAugOp], type[cst.BaseAugOp]] = {
    cst.AddAssign: cst.SubtractAssign,
    cst.SubtractAssign: cst.AddAssign,
    cst.MultiplyAssign: cst.AddAssign,
    cst.BitOrAssign: cst.BitAndAssign,
}
_NAMES = {
    "True": "False", "False": "True", "any": "all", "all": "any", "min": "max", "max": "min", "append": "extend",
    "startswith": "endswith", "endswith": "startswith", "lstrip": "rstrip", "rstrip": "lstrip", "upper": "lower", "lower": "upper",
    "keys": "values", "values": "keys", "find": "rfind", "rfind": "find", "split": "rsplit", "rsplit": "split",
}  # fmt: skip


def _spaced(old: cst.CSTNode, new: type[cst.CSTNode]) -> cst.CSTNode:
    """The new operator with the old operator's whitespace."""
    kept = {name: getattr(old, name) for name in ("whitespace_before", "whitespace_after") if hasattr(old, name)}
    changed = new(**kept)
    if isinstance(changed, cst.NotIn | cst.IsNot) or isinstance(old, cst.NotIn | cst.IsNot):
        return new()  # words need their own spaces
    return changed


def _operators(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    if isinstance(node, cst.ComparisonTarget) and type(node.operator) in _COMPARISONS:
        kind, other = _COMPARISONS[type(node.operator)]
        yield kind, node.with_changes(operator=_spaced(node.operator, other))
    elif isinstance(node, cst.BinaryOperation) and type(node.operator) in _ARITHMETIC:
        if not isinstance(node.left, cst.SimpleString | cst.FormattedString | cst.ConcatenatedString):
            yield "arithmetic", node.with_changes(operator=_spaced(node.operator, _ARITHMETIC[type(node.operator)]))
    elif isinstance(node, cst.AugAssign) and type(node.operator) in _AUGMENTED:
        yield "arithmetic", node.with_changes(operator=_spaced(node.operator, _AUGMENTED[type(node.operator)]))
    elif isinstance(node, cst.BooleanOperation):
        yield (
            "logic",
            node.with_changes(
                operator=_spaced(node.operator, cst.Or if isinstance(node.operator, cst.And) else cst.And)
            ),
        )
    elif isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        yield "negation", node.expression


def _is_self(arg: cst.Arg) -> bool:
    """True for `self` and `cls`, which are not swapped with other arguments: such a fault is too obvious."""
    return isinstance(arg.value, cst.Name) and arg.value.value in ("self", "cls")


def _values(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    if isinstance(node, cst.Integer) and node.value.isdecimal() and len(node.value) < 4:
        yield "constant", node.with_changes(value=str(int(node.value) + 1))
    elif isinstance(node, cst.Name) and node.value in _NAMES:
        yield "name", node.with_changes(value=_NAMES[node.value])
    elif (
        isinstance(node, cst.Call) and len(node.args) > 1 and not any(arg.star or arg.keyword for arg in node.args[:2])
    ):
        one, two, *rest = node.args
        if not (_is_self(one) or _is_self(two) or one.value.deep_equals(two.value)):
            swapped = [one.with_changes(value=two.value), two.with_changes(value=one.value), *rest]
            yield "argument order", node.with_changes(args=swapped)
    elif isinstance(node, cst.IfExp):
        yield "branches", node.with_changes(body=node.orelse, orelse=node.body)


def _statements(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    if isinstance(node, cst.If) and isinstance(node.orelse, cst.Else):
        yield "branches", node.with_changes(body=node.orelse.body, orelse=node.orelse.with_changes(body=node.body))
    elif isinstance(node, cst.Break):
        yield "loop exit", cst.Continue(semicolon=node.semicolon)
    elif isinstance(node, cst.Continue):
        yield "loop exit", cst.Break(semicolon=node.semicolon)
    elif isinstance(node, cst.IndentedBlock) and len(node.body) > 1:
        for at, each in enumerate(node.body):
            if kind := _missing(each):
                yield kind, node.with_changes(body=[*node.body[:at], *node.body[at + 1 :]])


def _missing(statement: cst.BaseStatement) -> str:
    """The kind of fault that leaving out this statement makes; "" if it must not be left out."""
    if isinstance(statement, cst.If) and statement.orelse is None:
        return "missing case"
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        only = statement.body[0]
        if isinstance(only, cst.AugAssign) or (isinstance(only, cst.Expr) and isinstance(only.value, cst.Call)):
            return "missing step"
        if isinstance(only, cst.Assign) and not isinstance(only.targets[0].target, cst.Name):
            return "missing step"
    return ""


_RULES: tuple[Callable[[cst.CSTNode], Iterator[tuple[str, cst.CSTNode]]], ...] = (_operators, _values, _statements)


_LEFT_ALONE = (cst.Annotation, cst.Decorator, cst.Assert)


class _Planting(cst.CSTTransformer):
    """Walks a function, injects fault number `wanted`, and lists the kinds of all possible faults.

    Annotations and decorators are left alone, and so are assertions: a faulty assertion could be fixed by deleting it.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.kinds: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, _LEFT_ALONE)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(original_node, _LEFT_ALONE):
            return updated_node
        for rule in _RULES:
            for kind, changed in rule(original_node):
                self.kinds.append(kind)
                if len(self.kinds) - 1 == self.wanted:
                    return changed
        return updated_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    r"""A function's lines with one fault in them.

    Example: ``Fault(kind="boundary", block="def f(x):\n    return x <= 1\n")``
    """

    kind: str
    block: str


def faults(block: str, *, most: int | None = None, seed: int = 0) -> list[Fault]:
    """The faults of a function that still compile: all, or at most `most`, drawn without replacement.

    Raises ValueError if the lines are not one function. Two faults never have the same text.
    """
    module, _ = parse_block(block)
    counting = _Planting(-1)
    module.visit(counting)  # the same walk that injects faults, so that the numbers agree
    numbers = list(range(len(counting.kinds)))
    if most is not None:
        random.Random(seed).shuffle(numbers)
    found: dict[str, Fault] = {}
    for number in numbers:
        if most is not None and len(found) >= most:
            break
        code = module.visit(_Planting(number)).code
        text = code[len(WRAPPER) :] if block[:1] in (" ", "\t") else code
        if text != block and _compiles(code):
            found.setdefault(text, Fault(kind=counting.kinds[number], block=text))
    return list(found.values())


def _compiles(code: str) -> bool:
    try:
        compile(code, "block", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
