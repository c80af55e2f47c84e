"""What the package says to people is true for someone who installed a wheel: it names no file and no command of a clone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = (ROOT / "src" / "ostinato", ROOT / "client" / "src" / "ostinato_client")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
COMMANDS = re.compile(rf"\bmake ({'|'.join(TARGETS)})\b(?![ ]\w)|\.venv/bin")
PATHS = re.compile(r"(?<![\w./])(?:docs|tests|benchmarks|deploy|client|\.ci)/[\w./-]*\w|\bthe guide\b")


def sayings(path: Path) -> Iterator[str]:
    """The texts of a file that can reach a person: string literals, and the docstrings of the command line, which are its help."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield text
        return
    nodes = list(ast.walk(ast.parse(text)))
    notes = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    for node in nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and ("cli" in path.parts or id(node) not in notes)
        ):
            yield node.value


def of_a_clone(text: str) -> list[str]:
    """What a text names that only a clone has."""
    paths = [found[0] for found in PATHS.finditer(text) if found[0] == "the guide" or (ROOT / found[0]).exists()]
    return [found[0] for found in COMMANDS.finditer(text)] + paths


def test_no_message_names_what_only_a_clone_has():
    files = [path for place in SOURCES for path in place.rglob("*") if path.suffix in {".py", ".html", ".js"}]
    assert len(files) > 500
    found = {
        str(path.relative_to(ROOT)): named for path in files for text in sayings(path) if (named := of_a_clone(text))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "run .venv/bin/ostinato demo",
        "not installed: make install",
        "see docs/numerics.md",
        "as the guide says",
        "python benchmarks/peers.py",
    ],
)
def test_a_planted_one_is_found(text):
    assert len(of_a_clone(text)) == 1


@pytest.mark.parametrize("text", ["make demo users of it", "/usr/docs/numerics.md", "docs/readme.md", "make a new one"])
def test_what_a_clone_does_not_own_passes(text):
    assert of_a_clone(text) == []
