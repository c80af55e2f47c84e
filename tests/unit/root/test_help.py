"""Help comes at once, and every example in it can be typed as it stands."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from ostinato.cli.commands import app
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.plan import load_description
from ostinato.run_directory import SERVED_REFS

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "numba", "scipy", "numpy", "pydantic", "aiohttp", "obstore")
COLLECT = f"""
import io, json, sys
from rich.console import Console
from ostinato.cli.commands import app
def walk(app, path=()):
    yield path, app
    for name in app:
        if not name.startswith("-"):
            yield from walk(app[name], (*path, name))
found = {{}}
for path, _ in walk(app):
    out = io.StringIO()
    app.help_print(list(path), console=Console(file=out, width=200))
    found[" ".join(path)] = out.getvalue()
print(json.dumps({{"help": found, "loaded": [name for name in {HEAVY!r} if name in sys.modules]}}))
"""


@pytest.fixture(scope="module")
def told():
    done = subprocess.run([sys.executable, "-c", COLLECT], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_help_loads_nothing_heavy_for_any_command(told):
    assert len(told["help"]) > 25
    assert told["loaded"] == []


def test_help_comes_in_half_a_second():
    """CPU seconds of the whole process, from its first instruction to the last line; one of five, for a busy machine."""
    program = (
        "import sys, time; sys.argv = ['ostinato', '--help']\nfrom ostinato.cli import main\n"
        "try: main()\nfinally: print('took', time.process_time(), file=sys.stderr)"
    )

    def took():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert "Usage: ostinato COMMAND" in done.stdout
        return float(done.stderr.split("took")[1])

    assert any(took() < 0.5 for _ in range(5))


def test_looking_at_a_run_loads_no_model_code():
    heavy = ("torch", "transformers", "numba", "tokenizers", "fastapi", "starlette", "uvicorn", "obstore")
    program = (
        "import sys\nimport ostinato.launch.commands.status, ostinato.launch.commands.log\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_key_set_in_a_help_text_is_one(told):
    shown = {words for text in told["help"].values() for words in re.findall(r"--set ([a-z_.]+=[^\s│;,]+)", text)}
    assert "train.learning_rate=1e-5" in shown
    for words in shown:
        load(None, [words])


def commands(text: str) -> set[str]:
    """What stands in backquotes, or alone on a line of a code block, and begins with the program's name."""
    quoted = re.findall(r"`ostinato ([^`]+)`", text)
    lines = re.findall(r"^(?:\$ )?ostinato ([^#\n\\]+?)\s*(?:#.*)?$", text, re.MULTILINE)
    return {" ".join(words.split()) for words in (*quoted, *lines)}


PLACEHOLDERS = {
    "COMMAND --help": "status --help",
    "rollback [NUMBER]": "rollback 3",
    "weights key FILE": "weights key publisher.key",
    "weights diff --html": "weights diff v1 v2 --html page.html",
    "weights pull URL": "weights pull s3://bucket/run",
    "weights drive-vllm URL": "weights drive-vllm http://127.0.0.1:8000",
}


def parses(words: str) -> None:
    """Raises unless it can be typed, or is the name of a command."""
    from ostinato.cli.commands import app

    tokens = shlex.split(PLACEHOLDERS.get(words, words))
    if app.parse_commands(tokens)[2]:
        app.parse_args(tokens, exit_on_error=False, print_error=False)
    for setting in (tokens[at + 1] for at, token in enumerate(tokens) if token == "--set"):
        (load_description if tokens[0] == "plan" else load)(None, [setting])


GUIDE = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs" / "guide").glob("*.md"))]
PAGES = ["docs/guarantees.md", "docs/limits.md"]
EXAMPLES = [
    f"examples/{name}" for name in ("README.md", "metric.toml", "own_world.py", "taskset/learn.sh", "tool_agent.py")
]


@pytest.mark.parametrize("name", ["README.md", *GUIDE, *PAGES, "ostinato.example.toml", *EXAMPLES])
def test_every_command_in_the_documents_can_be_typed(name):
    shown = commands((ROOT / name).read_text())
    assert shown or name in [*GUIDE, *PAGES]
    for words in shown:
        parses(words)


def test_every_command_in_help_and_messages_can_be_typed():
    """Help shows examples and errors name a remedy; one that is a command must be one."""
    shown = set()
    for path in (ROOT / "src" / "ostinato").rglob("*.py"):
        shown |= set(re.findall(r"`ostinato ([a-z][^`{}]*)`", path.read_text()))
    assert shown >= {"config train", "rollback", "ship", "doctor"}
    for words in shown:
        parses(words)


def test_only_slots_that_are_served_can_be_measured(told):
    for slot in SERVED_REFS:
        assert slot in told["help"]["eval"]
        parses(f"eval --slot {slot}")
    with pytest.raises(CycloptsError, match="candidate"):
        parses("eval --slot candidate")


def test_a_terminal_of_ascii_gets_what_it_can_show():
    words = ["config", "--set", "run.directory=müsli"]
    done = subprocess.run(
        [sys.executable, "-m", "ostinato.cli", *words],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert r"run.directory = 'm\xfcsli'" in done.stdout


def test_a_key_that_could_not_be_made_is_not_announced(tmp_path, capsys):
    place = tmp_path / "nowhere" / "key"
    with pytest.raises(BadConfig, match="give a new file"):
        app(["weights", "key", str(place)], result_action="return_value")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words", ["eval --draws 0", "log -n -3", "forget default --wait nan", "forget default --wait -1"]
)
def test_numbers_that_mean_nothing_are_refused(words):
    with pytest.raises(CycloptsError, match="Must be >="):
        app.parse_args(words.split(), exit_on_error=False, print_error=False)
