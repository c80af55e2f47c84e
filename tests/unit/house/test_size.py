"""The house's size: files within 700 lines, functions within 60, folders within three levels below a room; nothing is called utils.
An example has at most 60 lines, and the list of the examples names it.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE, EXAMPLES = ROOT / "src" / "ostinato", ROOT / "examples"
FORBIDDEN = {"utils", "common", "helpers", "manager"}
FILE_LINES, FUNCTION_LINES, LEVELS = 700, 60, 3
EXAMPLE_LINES = 60
MADE = {"node_modules", "package-lock.json", "__pycache__"}  # by running the examples


def violations(name: str, text: str) -> list[str]:
    found = [f"{name}: named {Path(name).stem}"] if Path(name).stem in FORBIDDEN else []
    if len(Path(name).parent.parts) > 1 + LEVELS:
        found.append(f"{name}: more than {LEVELS} folders below its room")
    if (lines := text.count("\n") + 1) > FILE_LINES:
        found.append(f"{name}: {lines} lines, {FILE_LINES} allowed")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, {FUNCTION_LINES} allowed")
    return found


def test_every_source_file_keeps_the_size():
    found = [
        line for path in SOURCE.rglob("*.py") for line in violations(str(path.relative_to(SOURCE)), path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("serve/long.py", "\n" * 700),
        ("serve/tall.py", "def tall():\n" + "    x = 1\n" * 60),
        ("core/utils.py", ""),
        ("serve/a/b/c/d/deep.py", ""),
    ],
)
def test_a_planted_violation_is_found(name, text):
    assert len(violations(name, text)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.py", "def tall():\n" + "    x = 1\n" * 59), ("serve/long.py", "\n" * 699), ("serve/a/b/c/deep.py", "")],
)
def test_what_just_keeps_the_size_passes(name, text):
    assert violations(name, text) == []


def test_every_example_is_short_and_in_the_list():
    listed = (EXAMPLES / "README.md").read_text()
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and not MADE & {path.name, *path.parts}]
    names = [str(path.relative_to(EXAMPLES)) for path in files if path.name != "README.md"]
    assert "taskset/tasks.jsonl" in names
    assert [name for name in names if f"({name})" not in listed] == []
    assert [name for name in names if len((EXAMPLES / name).read_text().splitlines()) > EXAMPLE_LINES] == []
