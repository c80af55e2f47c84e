"""Finds the functions of a source file that a task can be about, with their source text. Pure; nothing is run."""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from dataclasses import dataclass

_OPEN, _CLOSED = {"(", "[", "{"}, {")", "]", "}"}
_SAYS_NOTHING = {"None", "Any", "object"}  # as an annotation
_LEFT_OUT = {"overload", "setter", "getter", "deleter", "register", "abstractmethod"}  # parts of another definition


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A top-level function, or a method of a top-level class. Lines count from 1; `first` is the line of its first decorator, if any.

    `code_lines` counts the lines of its body that are neither blank, comment nor docstring. `signature` is the text up to
    the colon before the body, including decorators; `types` counts the type annotations in it that say something.

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
        """Identifies the function within its package."""
        return f"{self.path}::{self.name}"

    def block(self, text: str) -> str:
        """The function's lines in its file's text, with line endings."""
        return "".join(text.splitlines(keepends=True)[self.first - 1 : self.last])

    def replaced(self, text: str, block: str) -> str:
        """The file's text with the function replaced by `block`."""
        lines = text.splitlines(keepends=True)
        return "".join([*lines[: self.first - 1], block, *lines[self.last :]])


def _decorator(node: ast.expr) -> str:
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _types(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    stated = [node.returns, *(each.annotation for each in named)]
    return sum(each is not None and ast.unparse(each) not in _SAYS_NOTHING for each in stated)


def _function(path: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Function | None:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    last = node.end_lineno or node.lineno
    docstring = ast.get_docstring(node) or ""
    body = node.body[1:] if docstring or ast.get_docstring(node, clean=False) is not None else node.body
    header = _header("".join(lines[first - 1 : last]))
    shared = node.body[0].lineno < first + len(header.splitlines())  # the body begins on the line of the colon
    if not body or shared or {_decorator(each) for each in node.decorator_list} & _LEFT_OUT:
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
    """Of a function's lines, the decorators and the `def`, up to the colon before the body."""
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
    r"""The functions of a file, in file order; none if this interpreter cannot parse it.

    Left out are nested functions, functions whose body begins on the line of the colon, abstract methods, parts of a property, of an
    overload or of a dispatch, and names that are defined more than once.

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
