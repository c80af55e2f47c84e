"""import-linter's contracts hold, and each catches a violation planted in a copy of the tree."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S

ROOT = Path(__file__).parents[3]


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=WHOLE_PROGRAM_S,
        check=False,
    )


def test_the_tree_keeps_its_contracts():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


PLANTED = [
    ("serve/planted.py", "import ostinato.train.losses", "Floors"),
    ("model/planted.py", "import ostinato.serve.gateway", "Floors"),
    ("engine/planted.py", "import ostinato.serve.gateway", "Floors"),
    ("app/storage.py", "import ostinato.launch.commands.up", "Floors"),
    ("status/planted.py", "import ostinato.web.chart", "Floors"),
    ("status/planted.py", "import ostinato.engine.vllm", "The read model"),
    ("web/planted.py", "import ostinato.release.ledger", "The page sees"),
    ("weights/store/planted.py", "import ostinato.weights.follow.follower", "weight store's floors"),
    ("launch/placing/planted.py", "import ostinato.launch.commands.up", "Launch's floors"),
    ("reward/credit.py", "import pathlib", "Pure maths"),
    ("weights/follow/journal.py", "import time", "read no clock"),
    ("record/planted.py", "import torch", "without torch"),
    ("core/planted.py", "import pydantic", "core is standard library"),
    ("loop.py", "import ostinato.serve.gateway", "The loop sees core only"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """What is said of each broken contract, by its name, in a copy of the tree in which all violations are planted."""
    directory = tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT / "src", directory / "src", ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    shutil.copy(ROOT / "pyproject.toml", directory)
    for file, line, _ in PLANTED:
        planted = directory / "src" / "ostinato" / file
        before = planted.read_text() if planted.exists() else '"""Planted."""\n'
        head, _, rest = before.partition("from __future__ import annotations\n")
        planted.write_text(
            f"{head}from __future__ import annotations\n\n{line}\n{rest}" if rest else f"{before}{line}\n"
        )
    result = lint(directory)
    assert result.returncode != 0
    _, *sections = re.split(r"^(.+)\n-+\n", result.stdout.partition("\nBroken contracts\n")[2], flags=re.MULTILINE)
    return dict(zip(sections[::2], sections[1::2], strict=True))


@pytest.mark.parametrize(("file", "line", "contract"), PLANTED)
def test_a_planted_violation_breaks_its_contract(broken, file, line, contract):
    where, what = f"ostinato.{file.removesuffix('.py').replace('/', '.')}", line.removeprefix("import ")
    (said,) = (text for name, text in broken.items() if contract in name and f"{where} -> {what} " in text)
    assert said
