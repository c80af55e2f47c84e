"""`ostinato worlds grade` through real sandboxes: directories, diffs and texts, and its exit code."""

import io

import pytest
from rich.console import Console

from ostinato.app.worlds import open_grading
from ostinato.cli.worlds import grade
from ostinato.config import load
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, BadRequest, NotFound
from ostinato.core.sandbox import SandboxSpec
from ostinato.launch.commands.worlds.tasksets import changes_in, grade_changes
from ostinato.worlds.grading.judge import JudgedGrader
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.task import Grading, Task
from ostinato.worlds.tasks.tasksets import save, taskset_of

CONFIG = load()
ASK = (Message(role=Role.USER, text="Mend calc.py."),)
DATA = {
    "entry": "calc.py:add",
    "reference": "def add(a, b):\n    return a + b\n",
    "draw": "def draw(random):\n    return random.randrange(9), random.randrange(1, 9)\n",
    "draws": 8,
}
CALC = Task(
    id="calc",
    family="repair",
    messages=ASK,
    spec=SandboxSpec(files={"calc.py": b"def add(a, b):\n    return a - b\n"}),
    grading=Grading(grader="function", data=DATA),
)
WORD = Task(id="word", family="words", messages=ASK, grading=Grading(grader="pattern", data={"pattern": "^yes"}))
DIFF = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"


@pytest.fixture
def file(tmp_path):
    save(taskset_of("both", [CALC, WORD]), tmp_path / "tasks.jsonl")
    return tmp_path / "tasks.jsonl"


async def graded(file, task, changes) -> tuple[bool, str]:
    out = io.StringIO()
    return await grade_changes(CONFIG, file, task, changes, Console(file=out, width=200)), out.getvalue()


async def test_a_directory_a_diff_and_a_text_are_graded(file, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    solved, said = await graded(file, "calc", there)
    assert solved
    assert "calc  solved  value 1" in said
    assert "answers 1" in said
    (there / "calc.py").write_text("def add(a, b):\n    return a * b\n")
    solved, said = await graded(file, "calc", there)
    assert not solved
    assert "calc  not solved" in said
    patch = tmp_path / "mend.patch"
    patch.write_text(DIFF)
    assert (await graded(file, "calc", patch))[0]
    text = tmp_path / "answer.txt"
    text.write_text("yes, it is")
    assert (await graded(file, "word", text))[0]


async def test_who_cheats_is_told(file, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    (there / "sitecustomize.py").write_text("import os\nos._exit(0)\n")
    solved, said = await graded(file, "calc", there)
    assert not solved
    assert "calc  cheated  value 0" in said
    assert "sitecustomize.py" in said


def test_the_exit_code_says_whether_it_is_solved(file, tmp_path):
    text = tmp_path / "answer.txt"
    for word, code in (("yes", 0), ("no", 1)):
        text.write_text(word)
        with pytest.raises(SystemExit) as left:
            grade(file, task="word", changes=text)
        assert left.value.code == code


async def test_what_is_missing_is_named(file, tmp_path):
    with pytest.raises(NotFound, match="no task 'other'; it has calc, word"):
        await graded(file, "other", tmp_path)
    with pytest.raises(NotFound, match=r"--changes: there is no file .*; name a directory, a diff"):
        await graded(file, "word", tmp_path / "none.txt")
    (tmp_path / "a.diff").write_text(DIFF.replace("a - b", "a % b"))
    with pytest.raises(BadRequest, match="line 2"):
        await graded(file, "calc", tmp_path / "a.diff")


def test_links_are_changes_and_are_not_followed(tmp_path):
    there = tmp_path / "there"
    (there / "deep").mkdir(parents=True)
    (there / "deep" / "a.py").write_text("x")
    (there / "out").symlink_to(tmp_path)
    assert [(change.path, change.kind.value) for change in changes_in(there)] == [
        ("deep/a.py", "written"),
        ("out", "link"),
    ]


JUDGE = (
    "worlds.judge.url='http://127.0.0.1:9/v1'",
    "worlds.judge.model=small-2",
    "worlds.judge.key_env=JUDGE_KEY",
    "worlds.judge.axes=[{name='clarity', asks='How clear?', options={clear=1.0, unclear=0.0}}]",
    "worlds.effort.weight=0.2",
)


async def test_effort_and_judge_are_what_the_settings_say(monkeypatch):
    assert load().worlds.judge is None, "nothing is sent anywhere unless somebody says so"
    config = load(None, JUDGE)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(BadConfig, match="JUDGE_KEY, which is not set: export it"):
        async with open_grading(config):
            pass
    effort = {"final_tokens": 40_000.0}
    answer = (*ASK, Message(role=Role.ASSISTANT, text="yes"))
    rollout = Rollout(task="word", harness="h", ended=Ended.SUBMITTED, messages=answer, turns=("a:0",), effort=effort)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with open_grading(config) as (_, grader):
        found = await grader.grade(WORD, rollout)
        assert isinstance(grader._graders["function"], JudgedGrader)
    assert found.value == pytest.approx(0.8)
    async with open_grading(load()) as (_, grader):
        assert (await grader.grade(WORD, rollout)).value == 1.0
