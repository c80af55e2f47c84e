"""Whatever a taskset holds comes back from its file as it was, with the same hash; any other content has another hash."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.tasks import tasklists, tasks

from ostinato.core.errors import BadConfig
from ostinato.worlds.tasks.harbor import harbor_task
from ostinato.worlds.tasks.rows import parse_row
from ostinato.worlds.tasks.tasksets import load, save, taskset_of


@settings(max_examples=150, deadline=None)
@given(tasklists)
def test_what_is_saved_is_what_is_loaded(made):
    taskset = taskset_of("set", made)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "set.jsonl"
        save(taskset, path)
        assert load(path) == taskset


@settings(max_examples=100, deadline=None)
@given(tasks, tasks)
def test_two_tasks_have_one_hash_only_if_they_are_equal(one, other):
    other = replace(other, id=one.id)
    same = taskset_of("a", [one]).hash == taskset_of("b", [other]).hash
    assert one == other or not same
    assert taskset_of("b", [replace(one)]).hash == taskset_of("a", [one]).hash


@given(tasks, st.data())
def test_a_changed_byte_of_a_hidden_file_is_seen(task, data):
    grading = replace(task.grading, hidden={**task.grading.hidden, "zz": data.draw(st.binary(min_size=1))})
    other = replace(grading, hidden={**grading.hidden, "zz": grading.hidden["zz"] + b"\0"})
    before, after = (taskset_of("a", [replace(task, grading=each)]).hash for each in (grading, other))
    assert before != after


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_no_line_ends_in_anything_but_a_named_error(line):
    refused = ""
    try:
        parse_row("line 1", line)
    except BadConfig as error:
        refused = str(error)
    assert not refused or refused.startswith("line 1")


_names = st.sampled_from(
    [
        "id",
        "name",
        "prompt",
        "role",
        "content",
        "type",
        "text",
        "user",
        "tool",
        "assistant",
        "tool_calls",
        "tool_call_id",
        "system_prompt",
        "timeout",
        "agent",
        "resources",
        "memory",
        "network_allow",
        "workdir",
    ]
)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | _names | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4),
)


@settings(deadline=None)
@given(st.text(max_size=60) | st.dictionaries(_names, _values, max_size=3).map(json.dumps), st.text(max_size=60))
def test_no_folder_of_harbors_ends_in_anything_but_a_task_or_a_named_error(config, docker):
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        for name, text in [
            ("task.toml", f'environment.network_mode = "no-network"\n{config}'),
            ("environment/Dockerfile", f"WORKDIR /app\nCOPY {docker}"),
            ("instruction.md", config),
            ("tests/test.sh", ""),
        ]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        with suppress(BadConfig):
            assert harbor_task(folder).spec.workdir == "/app"
