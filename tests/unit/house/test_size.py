"""The house's size: a file stays under 400 lines, a function under 60, and nothing is called utils."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "ostinato"
FORBIDDEN = {"utils", "common", "helpers", "manager"}


def violations(name: str, text: str) -> list[str]:
    found = [f"{name}: named {Path(name).stem}"] if Path(name).stem in FORBIDDEN else []
    if (lines := text.count("\n") + 1) > 400:
        found.append(f"{name}: {lines} lines, 400 allowed")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > 60:
                found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, 60 allowed")
    return found


def test_every_source_file_keeps_the_size():
    found = [
        line for path in SOURCE.rglob("*.py") for line in violations(str(path.relative_to(SOURCE)), path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("serve/long.py", "\n" * 400),
        ("serve/tall.py", "def tall():\n" + "    x = 1\n" * 60),
        ("core/utils.py", ""),
    ],
)
def test_a_planted_violation_is_found(name, text):
    assert len(violations(name, text)) == 1


def test_a_function_of_sixty_lines_passes():
    assert violations("a.py", "def tall():\n" + "    x = 1\n" * 59) == []
