"""`ostinato worlds show` says what a taskset holds, and the example in its help does what it says."""

import io
import re
import shlex

import pytest
from rich.console import Console
from tests.fakes.harbor_folders import save_harbor
from tests.fakes.tasks import calc_task

from ostinato.cli.commands import app
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.worlds.tasksets import shared_packages, show_taskset
from ostinato.worlds.tasks.task import Grading, Split
from ostinato.worlds.tasks.tasksets import save, taskset_of


def saved(path):
    tasks = [
        calc_task(),
        calc_task(id="b", split=Split.CANARY),
        calc_task(id="c", family="other\x1b[31m", split=Split.HELD_OUT, harness="single"),
    ]
    taskset = taskset_of("tasks", tasks)
    save(taskset, path)
    return taskset


def test_the_example_in_the_help_runs(tmp_path, monkeypatch, capsys):
    taskset = saved(tmp_path / "tasks.jsonl")
    out = io.StringIO()
    app.help_print(["worlds", "show"], console=Console(file=out, width=200))
    (example,) = re.findall(r"For example: ostinato (.+)", out.getvalue())
    monkeypatch.chdir(tmp_path)
    app(shlex.split(example), result_action="return_value")
    assert taskset.hash in capsys.readouterr().out


def test_the_table_counts_by_family_and_split(tmp_path):
    saved(tmp_path / "tasks.jsonl")
    out = io.StringIO()
    show_taskset(tmp_path / "tasks.jsonl", Console(file=out, width=80))
    rows = {cells[0]: cells[1:] for line in out.getvalue().splitlines() if len(cells := line.split()) > 4}
    assert rows["repair"] == ["tools", "pytest", "1", "0", "1", "0.1", "0.1"]
    assert rows["other\\x1b[31m"][:5] == ["single", "pytest", "0", "1", "0"]
    assert "\x1b" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_what_is_no_taskset_is_an_error(tmp_path):
    with pytest.raises(BadConfig, match="cannot be read"):
        show_taskset(tmp_path / "gone.jsonl", Console())


def test_harbors_folders_are_shown_as_well(tmp_path):
    save_harbor(taskset_of("own", [calc_task(), calc_task(id="b")]), tmp_path / "out")
    out = io.StringIO()
    show_taskset(tmp_path / "out", Console(file=out, width=80))
    assert "out  2 tasks" in out.getvalue()


def test_a_package_in_both_splits_is_told(tmp_path):
    tasks = [
        calc_task(about={"package": "Tabulate"}),
        calc_task(id="b", about={"package": "tabulate"}, split=Split.HELD_OUT),
        calc_task(id="c", about={"package": "parse"}),
    ]
    assert shared_packages(taskset_of("tasks", tasks)) == ["tabulate"]
    save(taskset_of("tasks", tasks), tmp_path / "tasks.jsonl")
    out = io.StringIO()
    show_taskset(tmp_path / "tasks.jsonl", Console(file=out, width=200))
    assert "tabulate has both training and held-out tasks" in out.getvalue()
    assert "parse has" not in out.getvalue()


def test_a_grader_that_is_not_built_in_is_pointed_out(tmp_path):
    tasks = [calc_task(harness="single", grading=Grading(grader="brevity"))]
    save(taskset_of("tasks", tasks), tmp_path / "tasks.jsonl")
    out = io.StringIO()
    show_taskset(tmp_path / "tasks.jsonl", Console(file=out, width=200))
    assert "brevity is not a built-in grader; worlds.graders must name it" in out.getvalue()
