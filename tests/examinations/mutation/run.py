"""Which small faults in rewards, log, releases and losses do the quick tests notice?

    python -m tests.examinations.mutation.run [--places 12] [--seed 1] [--again FILE]

Draws places of each room's source, changes one operator or constant there, and runs the unit and property tests that import the changed
module, then those of its room, up to --files of them, in a forked process that has imported torch already. A mutant that a test kills, or
that makes the tests run for more than --seconds of processor time, was noticed. One that survives may also be no fault at all: an equal
program. --again tries only what survived in an earlier file. Writes tests/examinations/results/mutation.json, or --out DIR.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "ostinato"
ROOMS = {
    "reward": "reward/**/*.py",
    "record": "record/**/*.py",
    "release": "release/**/*.py",
    "losses": "train/losses.py",
}
TESTS = ("tests/unit", "tests/property", "tests/contract")
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change. `start` and `end` are byte offsets in the file's text, whose bytes there become `text`."""

    room: str
    file: str
    line: int
    start: int
    end: int
    text: str
    was: str


class Places:
    """Every change that this examination knows in a file."""

    def __init__(self, room: str, path: Path) -> None:
        self._room, self._file, self._data = room, str(path.relative_to(ROOT)), path.read_bytes()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def __iter__(self) -> Iterator[Mutant]:
        for node in ast.walk(ast.parse(self._data)):
            match node:
                case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in SWAPS:
                    yield self._between(node.left, right, SWAPS[type(operator)])
                case ast.BinOp(op=operator) if type(operator) in SWAPS and not isinstance(node.left, ast.Constant):
                    yield self._between(node.left, node.right, SWAPS[type(operator)])
                case ast.BoolOp(op=operator, values=[left, right]):
                    yield self._between(left, right, SWAPS[type(operator)])
                case ast.UnaryOp(op=ast.Not()):
                    start = self._starts[node.lineno - 1] + node.col_offset
                    yield self._change(node.lineno, start, start + len("not"), "bool")
                case ast.Constant(value=bool() as value):
                    yield self._instead(node, str(not value))
                case ast.Constant(value=int() | float() as value):
                    yield self._instead(node, f"({value} + 1)")
                case _:
                    pass

    def _change(self, line: int, start: int, end: int, text: str) -> Mutant:
        was = self._data[start:end].decode()
        return Mutant(room=self._room, file=self._file, line=line, start=start, end=end, text=text, was=was)

    def _end(self, node: ast.expr) -> int:
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def _instead(self, node: ast.expr, text: str) -> Mutant:
        return self._change(node.lineno, self._starts[node.lineno - 1] + node.col_offset, self._end(node), text)

    def _between(self, left: ast.expr, right: ast.expr, text: str) -> Mutant:
        """Another operator between two operands, whose brackets stay."""
        start, end = self._end(left), self._starts[right.lineno - 1] + right.col_offset
        closed, opened = self._data[start:end].count(b")"), self._data[start:end].count(b"(")
        return self._change(left.lineno, start, end, f"{')' * closed} {text} {'(' * opened}")


def drawn(count: int, seed: int) -> list[Mutant]:
    """`count` changes of each room, in files drawn by their number of places."""
    found: list[Mutant] = []
    for room, pattern in ROOMS.items():
        every = [mutant for path in sorted(SOURCE.glob(pattern)) for mutant in Places(room, path) if _compiles(mutant)]
        found += random.Random(f"{seed} {room}").sample(every, min(count, len(every)))
    return found


def mutated(mutant: Mutant) -> bytes:
    """The file's text with the change."""
    data = (ROOT / mutant.file).read_bytes()
    return data[: mutant.start] + mutant.text.encode() + data[mutant.end :]


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutated(mutant), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def module_of(mutant: Mutant) -> str:
    """The changed module's name."""
    return ".".join(Path(mutant.file).relative_to("src").with_suffix("").parts).removesuffix(".__init__")


def tests_of(module: str, most: int) -> list[str]:
    """The test files that import a module by name, those of its own name first; then those of its package, then those of its room."""
    files = sorted(
        path for folder in TESTS for path in (ROOT / folder).rglob("test_*.py") if path.parent.name != "house"
    )
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    stem, name, found = module.rpartition(".")[2], module, list[str]()
    while name != "ostinato":
        more = [file for file, text in texts.items() if name in text and file not in found]
        found += sorted(more, key=lambda file: (stem not in file, "property" not in file))
        name = name.rpartition(".")[0]
    return found[:most]


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the changed module before the path does."""

    def __init__(self, mutant: Mutant) -> None:
        self._name, self._mutant = module_of(mutant), mutant

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self._name:
            return None
        file = str(ROOT / self._mutant.file)
        return importlib.util.spec_from_file_location(fullname, file, loader=self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(mutated(self._mutant), str(ROOT / self._mutant.file), "exec"), module.__dict__)


def survives(mutant: Mutant, files: Sequence[str], seconds: int) -> bool:
    """Run the tests with the change planted, in a fork."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):
            os.dup2(null, descriptor)
        sys.meta_path.insert(0, Planted(mutant))
        import pytest

        quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # hypothesis was imported before
        os._exit(pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *quiet, *files]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> None:
    """Draw, plant, run, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=8, help="the most test files for one change")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "examinations" / "results")
    given = parser.parse_args()
    import hypothesis  # noqa: F401 - imported before forks, as torch is
    import torch  # noqa: F401

    assert not [name for name in sys.modules if name.split(".")[0] == "ostinato"], "a change would come too late"
    if given.again:
        mutants = [Mutant(**each["mutant"]) for each in json.loads(given.again.read_text()) if each["survived"]]
    else:
        mutants = drawn(given.places, given.seed)
    os.chdir(ROOT)
    for mutant in {mutant.room: mutant for mutant in mutants}.values():
        same = replace(mutant, text=mutant.was)
        files = tests_of(module_of(same), given.files)
        assert survives(same, files, given.seconds), f"without a change they fail, or take too long: {files}"
    lines: list[dict[str, Any]] = []
    for mutant in mutants:
        files = tests_of(module_of(mutant), given.files)
        survived = not files or survives(mutant, files, given.seconds)
        lines.append({"mutant": asdict(mutant), "survived": survived, "tests": files})
        print(
            f"{'survived' if survived else 'killed  '} {mutant.file}:{mutant.line} {mutant.was!r} -> {mutant.text!r}",
            flush=True,
        )
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "mutation.json").write_text(json.dumps(lines, indent=1) + "\n")
    for room in ROOMS:
        told = Counter(line["survived"] for line in lines if line["mutant"]["room"] == room)
        print(f"{room}: {told[False]} killed, {told[True]} survived")


if __name__ == "__main__":
    main()
