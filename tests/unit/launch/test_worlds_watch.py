"""What the terminal shows of a run's worlds: all of it, what ended, and one rollout step by step; nothing of it obeyed."""

import io

import pytest
from rich.console import Console
from tests.fakes.worlds_page import AT, finished, steps, worlds_of, write_lines, write_run

from ostinato.app.storage import Home
from ostinato.core.errors import NotFound
from ostinato.launch.commands.worlds.watch import print_ended, print_rollout, screen
from ostinato.testing.log import MemoryLog

CHEAT = finished("w3f.0.1.0", value=0.0, cheated=["patched \x1b[2Jthe judge"])


@pytest.fixture
async def facts(tmp_path):
    home, log = Home(tmp_path / "run"), MemoryLog()
    tasks = write_run(home, rollouts=[finished(), CHEAT, finished("m1.0", task="held-1", split="held_out", group=None)])
    await log.append(*steps())
    found = worlds_of(home, tasks, log)
    yield found, home
    found.close()


def a_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200), out


async def test_the_screen_shows_groups_success_and_what_ended_last(facts):
    console, out = a_console()
    console.print(screen(await facts[0].worlds(""), AT + 5))
    said = out.getvalue()
    for part in ("taskset tasks", "2 drawn, 1 under way, 1 wait for the trainer", "w3f.1  calc-2  +?..", "5 s ago"):
        assert part in said, said
    assert "w3f.0  calc-1  +!  waits for the trainer" in said
    assert "held-1  held_out  1 (submitted)  v4 to v5" in said
    assert "cheated 1 times: patched" in said
    assert "\x1b[2J" not in said


async def test_what_ended_is_told_once_in_order(facts):
    console, out = a_console()
    seen = await print_ended(facts[0], -1, console)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["w3f.0.0.0", "w3f.0.1.0", "m1.0"]
    assert await print_ended(facts[0], seen, console) == seen
    write_lines(facts[1].finished, [finished("w3f.1.0.0", value=None, solved=False, ended="failed")])
    await print_ended(facts[0], seen, console)
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert "not graded (failed)" in lines[-1]


async def test_a_rollout_is_shown_step_by_step_with_its_diff_and_its_grading(facts):
    console, out = a_console()
    await print_rollout(facts[0], console, episode="w3f.0.0.0")
    said = out.getvalue()
    order = [
        "rollout w3f.0.0.0",
        "its group:",
        "turn 1",
        "Mend calc.py",
        'call read {"path": "calc.py"}',
        "turn 2",
        "return a - b",
        "answer: Done: it adds.",
        "written calc.py",
        "+    return a + b",
        "graded",
        "fail_to_pass 1",
        "1 of 1 and 3 of 3 tests pass",
        "output_tokens 46",
    ]
    places = [said.index(part) for part in order]
    assert places == sorted(places)
    console, out = a_console()
    await print_rollout(facts[0], console, task="calc-1")
    assert "rollout w3f.0.1.0" in out.getvalue(), "the newest of a task"
    assert "cheated: patched" in out.getvalue()
    assert "\x1b" not in out.getvalue()


async def test_what_is_not_there_is_named(facts):
    console, _ = a_console()
    with pytest.raises(NotFound, match="no finished rollout of task 'other'"):
        await print_rollout(facts[0], console, task="other")
    with pytest.raises(NotFound, match="no rollout 'w9'"):
        await print_rollout(facts[0], console, episode="w9")
