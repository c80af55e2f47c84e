"""A run's simulated worlds, written by a test: a taskset, a journal, the record of finished rollouts, the turns in a log."""

import json
from pathlib import Path

from ostinato.app.storage import Home
from ostinato.config import load
from ostinato.core.conversation import Message, Role
from ostinato.core.records import Arm, PolicyVersion, Sampling, Span, Turn
from ostinato.core.sandbox import SandboxSpec
from ostinato.status.worlds.run_worlds import RunWorlds
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn
from ostinato.testing.renderer import ByteRenderer
from ostinato.worlds.tasks.task import Grading, Split, Task
from ostinato.worlds.tasks.tasksets import save, taskset_of

AT = 1_794_999_000.0
SECRET, ANSWER = "assert add(2, 3) == 5", "return a + b  # as it should be"
DIFF = "--- calc.py\n+++ calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"


def weights(number):
    return PolicyVersion(number=number, hash=f"{number + 10:02x}" * 32)


def a_task(id="calc-1", family="repair", split=Split.TRAIN, text="Mend calc.py: add must add.", **changes):
    fields = {
        "id": id,
        "family": family,
        "split": split,
        "messages": (Message(role=Role.USER, text=text),),
        "grading": Grading(
            grader="pytest",
            data={"fail_to_pass": ["test_calc.py::test_add"], "solution": {"calc.py": ANSWER}},
            hidden={"test_calc.py": SECRET.encode()},
        ),
        "spec": SandboxSpec(files={"calc.py": b"def add(a, b):\n    return a - b\n", "README.md": b"Adds.\n"}),
        "harness": "tools",
        "turns": 6,
    }
    return Task(**fields | changes)


def finished(episode="w3f.0.0.0", **changes):
    """A line of the record, as the rollout worker writes it."""
    number = changes.pop("number", 4)
    value = changes.get("value", 1.0)
    group, _, member = episode.rpartition(".")[0].rpartition(".")
    fields = {
        "at": AT,
        "taskset": "9f2c" * 16,
        "task": "calc-1",
        "family": "repair",
        "split": "train",
        "harness": "tools@3f2a91",
        "group": group,
        "member": int(member) if member.isdigit() else None,
        "episode": episode,
        "turns": [f"{episode}:{n}" for n in range(2)],
        "policy": {"number": number, "hash": weights(number).hash},
        "policy_last": {"number": number + 1, "hash": weights(number + 1).hash},
        "value": value,
        "solved": value == 1.0,
        "parts": {} if value is None else {"fail_to_pass": value, "pass_to_pass": 1.0},
        "why": "1 of 1 and 3 of 3 tests pass" if value else "0 of 1 tests pass",
        "cheated": [],
        "ended": "submitted",
        "effort": {"turns": 2.0, "output_tokens": 46.0},
        "changes": [{"path": "calc.py", "kind": "written", "diff": DIFF}],
    }
    return fields | changes


def write_lines(path, lines, mode="a"):
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def journal(groups=((0, "calc-1", (1.0, 0.0), True), (1, "calc-2", (1.0, None, "under way", "waiting"), False))):
    """A journal's events for groups given by number, task, state of each member, and whether the group was reported (`told`)."""
    events = [{"kind": "opened", "token": "w3f"}]
    for number, task, members, told in groups:
        events.append({"kind": "drawn", "n": number, "task": task, "epoch": 0, "size": len(members)})
        for member, state in enumerate(members):
            about = {"n": number, "member": member, "episode": f"w3f.{number}.{member}.0"}
            if state != "waiting":
                events.append({"kind": "begun", **about})
            if state not in ("waiting", "under way"):
                events.append({"kind": "ended", **about, "last": True, "turns": [], "grade": state, "why": "submitted"})
        if told:
            events.append({"kind": "told", "n": number})
    return events


def steps(episode="w3f.0.0.0", renderer=None, number=4):
    """Two turns of one episode, the second after the result of a tool's call."""
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "calc.py"}}\n</tool_call>'
    first = _turn(f"{episode}:0", episode, b"user\nMend calc.py: add must add.\x00assistant\n", call, number)
    prompt = bytes(first.prompt_ids) + bytes(first.sampled_ids) + b"\x00tool\ndef add(a, b):\n    return a - b\n\x00"
    second = _turn(f"{episode}:1", episode, prompt, "Done: it adds.", number + 1, parent=first.id)
    return first, second


def pieces(token):
    """The bytes of a token of `steps`; 0 is its control token."""
    return bytes([token]) if token else b""


def _turn(id, episode, prompt, answer, number, parent=None):
    sampled = tuple(answer.encode())
    return Turn(
        id=id,
        episode=episode,
        parent=parent,
        user="worlds",
        tenant="default",
        arm=Arm.WORLD,
        propensity=1.0,
        prompt_ids=tuple(prompt),
        sampled_ids=sampled,
        logprobs=(-0.2,) * len(sampled),
        spans=(Span(policy=weights(number), tokens=len(sampled)),),
        sampling=Sampling(max_tokens=200),
        finish=a_turn().finish,
        text=answer,
        started_at=AT - 3,
        ended_at=AT - 2,
    )


def write_run(home, *, tasks=None, rollouts=(), events=None):
    """The files of a run. Returns the taskset's path."""
    home.root.mkdir(parents=True, exist_ok=True)
    path = home.root / "tasks.jsonl"
    made = tasks or [
        a_task(),
        a_task("calc-2"),
        a_task("names-1", "names", harness="single", grading=Grading(grader="pattern", data={"pattern": "Ann"})),
        a_task("held-1", "repair", Split.HELD_OUT),
    ]
    found = taskset_of("tasks", made)
    save(found, path)
    write_lines(
        home.progress("rollout"), [{"kind": "tasks", "at": AT, "name": "tasks", "hash": found.hash, "count": len(made)}]
    )
    write_lines(home.root / "finished.jsonl", rollouts)
    write_lines(home.rollouts, journal() if events is None else events)
    return path


def worlds_of(home, tasks, log=None, source="worlds", shipped=None):
    """The page's view of the files of `write_run`. Its log is empty if none is given."""
    config = load(None, [f"worlds.file='{tasks}'", f"learn.source={source!r}", f"run.directory='{home.root}'"])
    return RunWorlds(home, config, log or MemoryLog(), pieces, readers=ByteRenderer().reader, shipped=shipped)


def no_worlds():
    """A run that learns from people and has never had a taskset."""
    return RunWorlds(Home(Path("/nonexistent")), load(None, []), MemoryLog(), pieces)
