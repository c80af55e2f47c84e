"""Tasks for tests, and Hypothesis strategies for everything that a taskset may hold."""

import json

from hypothesis import strategies as st

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.tasks.task import Grading, Split, Task

WRONG = b"def add(a, b):\n    return a - b\n"
RIGHT = b"def add(a, b):\n    return a + b\n"
TESTS = b"from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"


def calc_task(**changes):
    """A task to repair a small file."""
    fields = {
        "id": "calc-1",
        "family": "repair",
        "messages": (Message(role=Role.USER, text="Mend calc.py: add must add."),),
        "grading": Grading(
            grader="pytest",
            data={
                "fail_to_pass": ["test_calc.py::test_add"],
                "solution": {"calc.py": "def add(a, b):\n    return a + b\n"},
            },
            hidden={"test_calc.py": TESTS},
        ),
        "spec": SandboxSpec(files={"calc.py": WRONG}),
        "harness": "tools",
        "turns": 6,
        "tokens": 200,
    }
    return Task(**fields | changes)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_words = st.text("abcdefghijklmnop.-_ äß漢", min_size=1, max_size=12).filter(lambda word: word not in (".", ".."))
paths = st.lists(_words, min_size=1, max_size=3).map("/".join)


def _apart(files):
    """The files without those whose path would lie inside another file."""
    return {path: data for path, data in files.items() if not any(path.startswith(f"{other}/") for other in files)}


files = st.dictionaries(paths, st.one_of(st.binary(max_size=40), texts.map(str.encode)), max_size=4).map(_apart)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
_calls = st.builds(
    ToolCall, id=_words, name=_words, arguments=st.one_of(texts, st.dictionaries(texts, texts).map(json.dumps))
)
messages = st.one_of(
    st.builds(Message, role=st.sampled_from([Role.SYSTEM, Role.USER]), text=texts),
    st.builds(
        Message,
        role=st.just(Role.ASSISTANT),
        text=texts,
        reasoning=texts,
        calls=st.lists(_calls, max_size=2).map(tuple),
    ),
    st.builds(Message, role=st.just(Role.TOOL), text=texts, answers=_words, failed=st.booleans()),
)
_specs = st.builds(
    SandboxSpec,
    files=files,
    workdir=st.sampled_from(["/work", "/srv/app"]),
    env=st.dictionaries(
        st.text("ABC_", min_size=1, max_size=5), texts.map(lambda text: text.replace("\0", "")), max_size=2
    ),
    hosts=st.lists(st.sampled_from(["pypi.org:443", "127.0.0.1:8321"]), max_size=2).map(tuple),
    limits=st.builds(Limits, memory_mb=st.integers(16, 4096), processes=st.integers(1, 99)),
)
_gradings = st.builds(
    Grading,
    grader=_words,
    data=st.dictionaries(texts, _json, max_size=3),
    hidden=files,
    timeout_s=st.floats(0.1, 1000),
)
tasks = st.builds(
    Task,
    id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    family=_words,
    messages=st.lists(messages, min_size=1, max_size=4).map(tuple),
    grading=_gradings,
    spec=_specs,
    harness=_words,
    split=st.sampled_from(Split),
    turns=st.integers(1, 50),
    tokens=st.integers(1, 4096),
    stop=st.lists(texts.filter(bool), max_size=2).map(tuple),
    timeout_s=st.floats(0.1, 1000),
    about=st.dictionaries(texts, texts, max_size=2),
)
tasklists = st.lists(tasks, min_size=1, max_size=4, unique_by=lambda task: task.id)
