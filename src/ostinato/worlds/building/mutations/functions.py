"""The functions of a source file that a task can be about, and the text that each is made of. Pure; nothing is run."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass

_SAYS_NOTHING = {"None", "Any", "object"}  # as an annotation
_LEFT_OUT = {"overload", "setter", "getter", "deleter", "register", "abstractmethod"}  # parts of something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function or method at the top of its module or of a class there. Lines count from 1; `first` is its first decorator's.

    `code_lines` are the lines of its body that are neither blank, comment nor docstring. `signature` is what stands before, decorators too;
    `types` counts its parameters and results whose type is stated.

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
        """Names it within its package."""
        return f"{self.path}::{self.name}"

    def block(self, text: str) -> str:
        """Its own lines of its file's text, each with its line end."""
        return "".join(text.splitlines(keepends=True)[self.first - 1 : self.last])

    def replaced(self, text: str, block: str) -> str:
        """The file's text with other lines in its place."""
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
    if not body or body[0].lineno <= node.lineno or {_decorator(each) for each in node.decorator_list} & _LEFT_OUT:
        return None
    code = [line.strip() for line in lines[body[0].lineno - 1 : last]]
    start = node.body[0].lineno - 1
    return Function(
        path=path,
        name=name,
        first=first,
        last=last,
        code_lines=sum(bool(line) and not line.startswith("#") for line in code),
        docstring=docstring,
        signature=textwrap.dedent("".join(lines[first - 1 : start])).split("#")[0].strip(),
        in_class="." in name,
        types=_types(node),
    )


def functions_of(path: str, text: str) -> list[Function]:
    r"""The functions of a file, in its order; none for a file that this interpreter cannot read.

    Left out are functions within functions, those in one line with their header, parts of a property or of an overload, and a name that is
    defined more than once.

    Example: ``[f.name for f in functions_of("a.py", "def f():\n    return 1\n")]`` is ``["f"]``.
    """
    if "\f" in text or "\r" in text or "\x0b" in text or "\x1c" in text or "\u2028" in text:
        return []  # what `splitlines` and the parser count differently
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
