"""The house's names: a public class name stands once in the source, so that a search for it finds one thing."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "ostinato"


def doubled(sources: dict[str, str]) -> dict[str, list[str]]:
    """Public top-level classes that several files define, with the files."""
    found = defaultdict(list)
    for name, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_a_public_class_name_stands_once():
    assert doubled({str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}) == {}


def test_a_planted_second_class_of_a_name_is_found():
    sources = {"a.py": "class Part: ...", "b.py": "class Part: ...\nclass _Own: ...", "c.py": "class _Own: ..."}
    assert doubled(sources) == {"Part": ["a.py", "b.py"]}
