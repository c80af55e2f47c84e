"""Rows of verifiers' tasksets as tasks, without any of their code; field names of verifiers 0.4.0, `TaskData`."""

import json

import pytest

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import BadConfig
from ostinato.worlds.tasks.task import Grading
from ostinato.worlds.tasks.verifiers import load_verifiers

ROW = {
    "idx": 3,
    "id": "gsm-3",
    "name": "apples",
    "prompt": "How many?",
    "system_prompt": "Count.",
    "network_allow": [],
    "timeout": {"setup": None, "agent": 30.0},
    "resources": {"cpu": 1.0, "memory": 0.5, "gpu": None},
    "answer": "7",
}


def graded(row):
    return Grading(grader="pattern", data={"pattern": row["answer"]})


def read(tmp_path, *rows, **options):
    path = tmp_path / "gsm.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_verifiers(path, graded, **options)


def test_a_row_gives_its_task(tmp_path):
    taskset = read(tmp_path, ROW, turns=4)
    (task,) = taskset.tasks
    assert (taskset.name, task.id, task.turns, task.timeout_s) == ("gsm", "gsm-3", 4, 30.0)
    assert task.messages == (Message(role=Role.SYSTEM, text="Count."), Message(role=Role.USER, text="How many?"))
    assert task.grading.data == {"pattern": "7"}
    assert (task.spec.limits.memory_mb, task.spec.hosts, task.about) == (512, (), {"name": "apples"})


def test_a_prompt_of_messages_is_kept(tmp_path):
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "name": "add", "arguments": "{}"}]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    (task,) = read(tmp_path, ROW | {"prompt": prompt, "system_prompt": None}).tasks
    assert task.messages == (
        Message(role=Role.USER, text="a\nb"),
        Message(role=Role.ASSISTANT, calls=(ToolCall(id="c", name="add", arguments="{}"),)),
        Message(role=Role.TOOL, text="7", answers="c"),
    )


def test_hosts_are_named_and_a_public_network_is_asked_for(tmp_path):
    (task,) = read(tmp_path, ROW | {"network_allow": ["pypi.org", "x.org:8080"]}).tasks
    assert task.spec.hosts == ("pypi.org:443", "pypi.org:80", "x.org:8080")
    assert read(tmp_path, ROW | {"network_allow": ["*"]}, offline=True).tasks[0].spec.hosts == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image": "python:3.11"}, "image cannot be had"),
        ({"agent_user": "bob"}, "agent_user"),
        ({"skills": ["/x"]}, "skills"),
        ({"artifacts": [{"source": "/x"}]}, "artifacts"),
        ({"network_block": ["x.org"]}, "network_block"),
        ({"network_allow": ["*"]}, "'*' cannot be had"),
        ({"network_allow": ["*.x.org"]}, "one host"),
        ({"network_allow": "x"}, "must be a list"),
        ({"resources": {"gpu": "A100"}}, "resources.gpu"),
        ({"resources": 1}, "resources must be an object"),
        ({"timeout": {"setup": 5}}, "timeout.setup"),
        ({"timeout": {"agent": -1}}, "timeout.agent"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": [{"role": "robot"}]}, "prompt.0.role"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"prompt": [{"role": "user", "content": "", "colour": 1}]}, "prompt.0.colour"),
        ({"prompt": [{"role": "assistant", "provider_state": [{}]}]}, "provider_state"),
        ({"prompt": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "calls of functions"),
        ({"workdir": "../x"}, "world.workdir"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(tmp_path, change, said):
    with pytest.raises(BadConfig) as caught:
        read(tmp_path, ROW | {"id": "first"}, ROW | change)
    assert said in str(caught.value)
    assert "line 2" in str(caught.value) or "gsm-3" in str(caught.value)


def test_what_is_no_row_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"id": 1, "id": 2}\n')
    with pytest.raises(BadConfig, match=r"line 1.*stands twice"):
        load_verifiers(tmp_path / "x.jsonl", graded)
