"""Mutations of a package's functions: finds functions that tasks can be about, removes their bodies, and injects small faults.

Pure functions; no package code is run. A fault resembles a person's mistake; each mutation has one, and the function's formatting is kept.
A body is removed so that the solver must write it, or to test whether a stub passes the tests.
"""

from __future__ import annotations

import ast
import io
import random
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

# ---------------------------------------------------------------- functions


_OPEN, _CLOSED = {"(", "[", "{"}, {")", "]", "}"}
_UNINFORMATIVE = {"None", "Any", "object"}  # annotations without information
# decorators of functions that are parts of another definition
_SKIPPED_DECORATORS = {"overload", "setter", "getter", "deleter", "register", "abstractmethod"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A top-level function, or a method of a top-level class.

    `first`, `last`: its lines, from 1, including decorators. `code_lines`: the number of lines of its body that are neither blank, comment
    nor docstring. `signature`: the text up to the colon before the body, including decorators. `types`: the number of informative type
    annotations in it.

    Example: ``Function(path="calc.py", name="Stack.pop", first=3, last=6, code_lines=3, docstring="Take one.", signature="def pop(self):",
    in_class=True)``
    """

    path: str
    name: str
    first: int
    last: int
    code_lines: int
    docstring: str
    signature: str
    in_class: bool
    types: int = 0

    @property
    def key(self) -> str:
        """The function's identifier within its package."""
        return f"{self.path}::{self.name}"

    def block(self, text: str) -> str:
        """Return the function's lines in its file's text, with line endings."""
        return "".join(text.splitlines(keepends=True)[self.first - 1 : self.last])

    def replaced(self, text: str, block: str) -> str:
        """Return the file's text with the function replaced by `block`."""
        lines = text.splitlines(keepends=True)
        return "".join([*lines[: self.first - 1], block, *lines[self.last :]])


def _decorator(node: ast.expr) -> str:
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _types(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    annotations = [node.returns, *(each.annotation for each in named)]
    return sum(each is not None and ast.unparse(each) not in _UNINFORMATIVE for each in annotations)


def _function(path: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Function | None:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    last = node.end_lineno or node.lineno
    docstring = ast.get_docstring(node) or ""
    body = node.body[1:] if docstring or ast.get_docstring(node, clean=False) is not None else node.body
    header = _header("".join(lines[first - 1 : last]))
    shared = node.body[0].lineno < first + len(header.splitlines())  # the body begins on the line of the colon
    if not body or shared or {_decorator(each) for each in node.decorator_list} & _SKIPPED_DECORATORS:
        return None
    code = [line.strip() for line in lines[body[0].lineno - 1 : last]]
    return Function(
        path=path,
        name=name,
        first=first,
        last=last,
        code_lines=sum(bool(line) and not line.startswith("#") for line in code),
        docstring=docstring,
        signature=textwrap.dedent(header).strip(),
        in_class="." in name,
        types=_types(node),
    )


def _header(text: str) -> str:
    """Return the decorators and the `def` of a function's lines, up to the colon before the body."""
    lines = text.splitlines(keepends=True)
    depth, defined = 0, False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        defined = defined or token.string == "def"
        depth += (token.string in _OPEN) - (token.string in _CLOSED)
        if defined and depth == 0 and token.string == ":":
            row, column = token.end
            return "".join([*lines[: row - 1], lines[row - 1][:column]])
    return text


def functions_of(path: str, text: str) -> list[Function]:
    r"""Return the functions of a file, in file order; none if this interpreter cannot parse it.

    Left out: nested functions, functions whose body begins on the line of the colon, abstract methods, parts of a property, overload or
    dispatch, and names that are defined more than once.

    Example: ``[f.name for f in functions_of("a.py", "def f():\n    return 1\n")]`` is ``["f"]``.
    """
    if "\f" in text or "\r" in text or "\x0b" in text or "\x1c" in text or "\u2028" in text:
        return []  # line breaks that `splitlines` and the parser count differently
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.splitlines(keepends=True)
    found: list[Function] = []
    names: list[str] = []
    for top in tree.body:
        group = [(f"{top.name}.", each) for each in top.body] if isinstance(top, ast.ClassDef) else [("", top)]
        for prefix, node in group:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.append(prefix + node.name)
                function = _function(path, prefix + node.name, node, lines)
                if function is not None:
                    found.append(function)
    return [function for function in found if names.count(function.name) == 1]


# ---------------------------------------------------------------- removal of bodies


WRAPPER = "if 1:\n"  # makes an indented block parse as a module, without changing its text


def parse_block(block: str) -> tuple[cst.Module, cst.FunctionDef]:
    """Parse a function's lines into a module and the function in it. Raises ValueError if they are not one function."""
    module = cst.parse_module(WRAPPER + block if block[:1] in (" ", "\t") else block)
    node = module.body[0] if len(module.body) == 1 else None
    if isinstance(node, cst.If) and isinstance(node.body, cst.IndentedBlock) and len(node.body.body) == 1:
        node = node.body.body[0]
    if not isinstance(node, cst.FunctionDef) or not isinstance(node.body, cst.IndentedBlock):
        raise ValueError("not the lines of one function with an indented body")
    return module, node


def write_block(module: cst.Module, old: cst.CSTNode, new: cst.CSTNode) -> str:
    """Return the block's text with one node replaced."""
    code = module.deep_replace(old, new).code  # pyright: ignore[reportAttributeAccessIssue] - a module stays a module
    return code.removeprefix(WRAPPER)


def with_body(block: str, statements: Sequence[str]) -> str:
    """Return the block with its signature and docstring, and `statements` as the rest of its body."""
    module, function = parse_block(block)
    body = function.body
    assert isinstance(body, cst.IndentedBlock)
    kept = [body.body[0]] if function.get_docstring(clean=False) is not None else []
    added = [cst.parse_statement(each) for each in statements]
    return write_block(module, body, body.with_changes(body=[*kept, *added], footer=[]))


def without_body(block: str) -> str:
    """Return the function as a stub that raises NotImplementedError."""
    return with_body(block, ["raise NotImplementedError\n"])


def returning_none(block: str) -> str:
    """Return the function as a stub that returns None."""
    return with_body(block, ["return None\n"])


# ---------------------------------------------------------------- faults


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
    """Return the new operator with the old operator's whitespace."""
    if issubclass(new, cst.NotIn | cst.IsNot) or isinstance(old, cst.NotIn | cst.IsNot):
        return new()  # operators that are words need their default spaces
    return new(**{name: getattr(old, name) for name in ("whitespace_before", "whitespace_after") if hasattr(old, name)})


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
        other = cst.Or if isinstance(node.operator, cst.And) else cst.And
        yield "logic", node.with_changes(operator=_spaced(node.operator, other))
    elif isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        yield "negation", node.expression


def _is_self(arg: cst.Arg) -> bool:
    """Return True for `self` and `cls`, which are never swapped with other arguments: such a fault is too obvious."""
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
    """Return the kind of fault that removing this statement makes; "" if it must not be removed."""
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


_NEVER_MUTATED = (cst.Annotation, cst.Decorator, cst.Assert)


class _FaultInjector(cst.CSTTransformer):
    """Walks a function, injects fault number `wanted`, and lists the kinds of all possible faults.

    Annotations and decorators are never mutated, nor are assertions: a faulty assertion could be fixed by deleting it.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.kinds: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, _NEVER_MUTATED)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(original_node, _NEVER_MUTATED):
            return updated_node
        for rule in _RULES:
            for kind, changed in rule(original_node):
                self.kinds.append(kind)
                if len(self.kinds) - 1 == self.wanted:
                    return changed
        return updated_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    r"""A function's lines with one injected fault.

    Example: ``Fault(kind="boundary", block="def f(x):\n    return x <= 1\n")``
    """

    kind: str
    block: str


def faults(block: str, *, most: int | None = None, seed: int = 0) -> list[Fault]:
    """Return the faults of a function that still compile, without duplicates: all, or a random sample of at most `most`.

    Raises ValueError if the lines are not one function.
    """
    module, _ = parse_block(block)
    counting = _FaultInjector(-1)
    module.visit(counting)  # the same walk as for the injection, so that the numbers agree
    numbers = list(range(len(counting.kinds)))
    if most is not None:
        random.Random(seed).shuffle(numbers)
    found: dict[str, Fault] = {}
    for number in numbers:
        if most is not None and len(found) >= most:
            break
        code = module.visit(_FaultInjector(number)).code
        # cut by length, since the fault may be in the wrapper; the block is unchanged then
        text = code[len(WRAPPER) :] if block[:1] in (" ", "\t") else code
        if text != block and compiles(code):
            found.setdefault(text, Fault(kind=counting.kinds[number], block=text))
    return list(found.values())


def compiles(code: str) -> bool:
    """Return True if this interpreter compiles a module's text."""
    try:
        compile(code, "block", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
