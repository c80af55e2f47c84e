"""The reference loop: what the model gets right is done, and what it gets wrong is answered, kept and counted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.tasks import RIGHT, WRONG, calc_task
from tests.fakes.worlds import DictSandbox, ScriptedModel, says, unanswered

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, TooLarge, Unavailable
from ostinato.core.sandboxing import Change, ChangeKind
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.harness.toolbox import TOOLS, cut
from ostinato.worlds.harness.tools import SYSTEM, ToolLoop, ToolsConfig

EDIT = {"path": "calc.py", "old": "a - b", "new": "a + b"}


async def work(*script, files=None, run=lambda argv, files, stdin: (0, b"ok\n"), config=None, **changes):
    sandbox = DictSandbox({"calc.py": WRONG} if files is None else files, run)
    model = ScriptedModel(*script)
    rollout = await ToolLoop(config).run(calc_task(**changes), model, sandbox)
    assert unanswered(rollout.messages) == []
    return rollout, model, sandbox


def results(rollout):
    return [message for message in rollout.messages if message.role is Role.TOOL]


async def test_a_file_is_read_mended_tried_and_submitted():
    rollout, model, sandbox = await work(
        says("I look.", ("read", {"path": "calc.py"})),
        says("", ("edit", EDIT), ("bash", {"command": "pytest -q"})),
        says("Done.", ("submit", {})),
    )
    assert (rollout.ended, len(rollout.turns)) == (Ended.SUBMITTED, 3)
    assert rollout.changes == (Change(path="calc.py", kind=ChangeKind.WRITTEN, data=RIGHT),)
    assert [message.text for message in results(rollout)] == [
        "1\tdef add(a, b):\n2\t    return a - b",
        "edited calc.py",
        "ok\n[exit code 0]",
        "submitted",
    ]
    assert sandbox.ran == [(["bash", "-c", "pytest -q"], {}, 60.0)]
    assert (rollout.effort["calls"], rollout.effort["bad_calls"], rollout.effort["tokens"]) == (4, 0, 15)
    assert model.asked[0][0][0] == Message(role=Role.SYSTEM, text=SYSTEM)
    assert all(tools == TOOLS for _, tools, _, _ in model.asked)
    assert model.asked[2][0] == rollout.messages[:-2]  # each question is the conversation so far


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("fly", {}), "no tool 'fly'; there are read, write, edit, bash, submit"),
        (("read", "{"), "not a JSON object"),
        (("read", "[1]"), "not a JSON object"),
        (("read", {}), "needs 'path'"),
        (("read", {"path": 1}), "'path' of read must be a string"),
        (("read", {"path": "calc.py", "first": 0}), "whole number"),
        (("read", {"path": "calc.py", "first": True}), "whole number"),
        (("read", {"path": "calc.py", "first": 9}), "has 3 lines"),
        (("read", {"path": "calc.py", "color": "red"}), "takes no 'color'"),
        (("read", {"path": "gone.py"}), "no file 'gone.py'"),
        (("read", {"path": "../x"}), "outside"),
        (("read", {"path": "raw"}), "not text"),
        (("read", {"path": "big"}), "larger than"),
        (("write", {"path": "/etc/passwd", "text": ""}), "outside"),
        (("write", {"path": "a", "text": "\ud800"}), "half a character"),
        (("edit", EDIT | {"old": "return"}), "occurs 2 times in 'calc.py' (lines [2, 3])"),
        (("edit", EDIT | {"old": "b - a"}), "does not occur in 'calc.py'; read the file"),
        (("edit", EDIT | {"old": "a  -  b"}), "other spaces"),
        (("edit", EDIT | {"old": ""}), "old is empty"),
        (("edit", EDIT | {"new": "a - b"}), "nothing would change"),
        (("bash", {"command": "a\0b"}), "NUL"),
        (("submit", {"now": "x"}), "takes no 'now'"),
    ],
)
async def test_a_bad_call_is_answered_and_kept(call, said):
    files = {"calc.py": WRONG + b"    return a * b\n", "raw": b"\xff", "big": b"x" * (1 << 20) + b"x"}
    rollout, model, sandbox = await work(says("", call), says("I stop."), files=files)
    (result,) = results(rollout)
    assert result.failed
    assert result.text.startswith("error: ")
    assert said in result.text
    assert sandbox.files == files
    assert rollout.effort["bad_calls"] == 1
    assert (rollout.ended, len(rollout.turns)) == (Ended.SUBMITTED, 2)
    assert model.asked[1][0][-2].calls[0].name == call[0]


@pytest.mark.parametrize(
    ("code", "said"),
    [(3, "[exit code 3]"), ("timeout", "[killed after 60 seconds]"), ("output", "too much"), ("memory", "memory")],
)
async def test_how_a_command_ended_is_said(code, said):
    rollout, _, _ = await work(
        says("", ("bash", {"command": "x"})), says("End."), run=lambda argv, files, stdin: (code, b"\xffa\n")
    )
    (result,) = results(rollout)
    assert result.text.startswith("\ufffda\n[")
    assert said in result.text


async def test_a_long_output_is_cut_in_the_middle():
    config = ToolsConfig(output_characters=100)
    long = b"a" * 300 + b"z" * 300
    rollout, _, _ = await work(
        says("", ("bash", {"command": "x"})), says("End."), run=lambda argv, files, stdin: (0, long), config=config
    )
    text = results(rollout)[0].text
    assert text.startswith("a" * 50 + "\n[... 514 characters left out here ...]\nz")
    assert text.endswith("z\n[exit code 0]")


async def test_calls_after_a_submission_are_not_done():
    rollout, _, sandbox = await work(says("", ("submit", {}), ("edit", EDIT)))
    assert [message.failed for message in results(rollout)] == [False, True]
    assert sandbox.files == {"calc.py": WRONG}


async def test_it_is_asked_no_more_often_than_the_task_says():
    rollout, model, _ = await work(*[says("", ("read", {"path": "calc.py"}))] * 9, turns=3)
    assert (rollout.ended, len(model.asked), len(results(rollout))) == (Ended.TURNS, 3, 3)


async def test_it_says_no_more_tokens_than_it_may():
    config = ToolsConfig(tokens=12)
    rollout, model, _ = await work(*[says("", ("read", {"path": "calc.py"}))] * 9, config=config)
    assert rollout.ended is Ended.LENGTH
    assert [most for _, _, most, _ in model.asked] == [12, 7, 2]


async def test_a_prompt_that_has_become_too_long_ends_it_for_its_length():
    rollout, _, _ = await work(says("", ("read", {"path": "calc.py"})), TooLarge("it does not fit"))
    assert (rollout.ended, len(rollout.turns)) == (Ended.LENGTH, 1)


async def test_calls_of_an_answer_that_was_cut_are_done():
    rollout, _, sandbox = await work(says("", ("edit", EDIT), finish="length"), says("End."))
    assert sandbox.files == {"calc.py": RIGHT}
    assert rollout.ended is Ended.SUBMITTED


async def test_a_task_with_a_system_message_keeps_it():
    ask = (Message(role=Role.SYSTEM, text="Own."), Message(role=Role.USER, text="Go."))
    _, model, _ = await work(says("End."), messages=ask)
    assert model.asked[0][0] == ask


async def test_a_sandbox_that_is_gone_is_raised_and_one_is_needed():
    sandbox = DictSandbox()
    await sandbox.stop()
    with pytest.raises(Unavailable):
        await ToolLoop().run(calc_task(), ScriptedModel(says("", ("bash", {"command": "x"}))), sandbox)
    with pytest.raises(BadConfig, match="none was opened"):
        await ToolLoop().run(calc_task(), ScriptedModel(), None)


@given(st.text(max_size=300), st.integers(1, 200))
def test_a_cut_text_keeps_both_ends_and_says_how_much_is_gone(text, most):
    shown = cut(text, most)
    if len(text) <= most:
        assert shown == text
    else:
        head, tail = most // 2, most - most // 2
        assert shown == f"{text[:head]}\n[... {len(text) - most} characters left out here ...]\n{text[-tail:]}"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*(t.name for t in TOOLS), "x"]),
            st.text(max_size=20)
            | st.dictionaries(
                st.sampled_from(["path", "old", "new", "text", "command", "first", "lines"]),
                st.text(max_size=8) | st.integers(),
            ).map(json.dumps),
        ),
        max_size=5,
    )
)
async def test_whatever_is_called_every_call_is_answered_once(calls):
    rollout, _, _ = await work(says("", *calls), says("End."), says("End."))
    assert rollout.effort["bad_calls"] <= len(calls)
