"""The contract of every harness: turns and messages in order, the model's mistakes stay in the conversation, every budget ends it."""

from dataclasses import replace

import pytest
import pytest_asyncio
from tests.fakes.scripted_model import ScriptedModel, says

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.sandbox import Change, ChangeKind, Limits, SandboxSpec
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.harnesses import HARNESSES, open_harness
from ostinato.worlds.harness.rollout import OVERRAN, Ended, OutOfTime
from ostinato.worlds.rollout.attempt import RolloutAttempts, Workshop
from ostinato.worlds.sandbox import Boxes
from ostinato.worlds.tasks.task import Grading, Task

CALC = b"def add(a, b):\n    return a - b\n"
SPEC = SandboxSpec(files={"calc.py": CALC}, limits=Limits(memory_mb=128, disk_mb=8, processes=16))
TASK = Task(
    id="calc",
    family="repair",
    messages=(Message(role=Role.USER, text="Mend calc.py."),),
    spec=SPEC,
    grading=Grading(grader="pytest"),
    turns=8,
    timeout_s=60.0,
)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes():
    made = Boxes()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(boxes):
    started = await boxes.start(SPEC)
    yield started
    await started.stop()


@pytest.fixture(params=HARNESSES)
def harness(request):
    return open_harness(request.param, {"command": ["true"]} if request.param == "repair" else None)


@pytest.fixture
def tools():
    return open_harness("tools")


def results(rollout):
    return [message.text for message in rollout.messages if message.role is Role.TOOL]


async def test_an_answer_is_a_rollout(harness, box):
    model = ScriptedModel(says("Done."))
    rollout = await harness.run(TASK, model, box)
    assert (rollout.ended, rollout.turns, rollout.task) == (Ended.SUBMITTED, ("t0:0",), "calc")
    assert rollout.harness == f"{harness.name}@{harness.hash}"
    assert rollout.messages == (*model.asked[0], Message(role=Role.ASSISTANT, text="Done."))
    assert model.asked[0][-1] == TASK.messages[-1]
    assert (rollout.effort["turns"], rollout.effort["tokens"], rollout.effort["final_tokens"]) == (1, 10, 10)
    assert [change.path for change in rollout.changes] == (["answer.py"] if harness.name == "repair" else [])
    assert len(harness.hash) == 16


async def test_a_cut_answer_is_told(harness, box):
    assert (await harness.run(TASK, ScriptedModel(says("Do", finish="length")), box)).ended is Ended.LENGTH


async def test_an_answer_that_its_time_cut_counts_and_ends_it(harness, box):
    call = says("Do", ("submit", {}), finish=OVERRAN) if harness.name == "tools" else says("Do", finish=OVERRAN)
    model = ScriptedModel(call)
    rollout = await harness.run(TASK, model, box)
    assert (rollout.ended, rollout.turns, rollout.effort["tokens"]) == (Ended.TIMEOUT, ("t0:0",), 10)
    assert rollout.messages[-1].text == "Do"
    assert rollout.detail["why"] == "after 60 s"
    assert 0 < model.left[0] <= 60.0
    assert rollout.changes == (), "nothing that it asks for is done any more"


async def test_a_time_that_is_over_before_a_word_is_raised(harness, box):
    with pytest.raises(OutOfTime):
        await harness.run(TASK, ScriptedModel(OutOfTime("nothing was said")), box)


@pytest.mark.parametrize("name", ["tools", "repair"])
async def test_a_time_that_is_over_before_the_next_word_ends_it_with_the_turn_before(name, box):
    harness = open_harness(name, {"command": ["false"]} if name == "repair" else None)
    first = says("", ("read", {"path": "calc.py"})) if name == "tools" else says("x = 1")
    model = ScriptedModel(first, OutOfTime("nothing was said"))
    rollout = await harness.run(TASK, model, box)
    assert (rollout.ended, rollout.turns) == (Ended.TIMEOUT, ("t0:0",)), "so that turn gets the grade"
    assert model.left[1] < model.left[0] <= 60.0


async def test_a_prompt_that_does_not_fit_teaches_nothing(harness, box):
    rollout = await harness.run(TASK, ScriptedModel(BadRequest("too long")), box)
    assert (rollout.ended, rollout.turns, rollout.detail["why"]) == (Ended.FAILED, (), "too long")


async def test_a_gateway_that_is_away_is_raised(harness, box):
    with pytest.raises(Unavailable):
        await harness.run(TASK, ScriptedModel(Unavailable("away")), box)


async def test_tools_work_in_the_sandbox_until_the_submit(tools, box):
    model = ScriptedModel(
        says("", ("read", {"path": "calc.py"}), ("read", {"path": "calc.py", "first": 2, "last": 2})),
        says(
            "",
            ("edit", {"path": "calc.py", "old": "a - b", "new": "a + b"}),
            ("write", {"path": "d/n.txt", "text": "é"}),
        ),
        says(
            "",
            ("bash", {"command": "python3 -c 'import calc; print(calc.add(2, 3))'; cat d/n.txt; echo; nope; exit 3"}),
        ),
        says("", ("submit", {}), ("bash", {"command": "rm calc.py"})),
    )
    rollout = await tools.run(TASK, model, box)
    assert (rollout.ended, rollout.turns) == (Ended.SUBMITTED, ("t0:0", "t1:0", "t2:0", "t3:0"))
    first, second, edited, wrote, ran, submitted, late = results(rollout)
    assert (first, second) == (CALC.decode(), "    return a - b\n")
    assert (edited, wrote, submitted) == ("edited calc.py", "wrote 2 bytes to d/n.txt", "submitted")
    assert ran.startswith("5\né\n")
    assert "nope" in ran
    assert ran.endswith("[exit 3]")
    assert late.startswith("error: not done")
    changed = {change.path: change for change in rollout.changes if "__pycache__" not in change.path}
    assert changed["calc.py"] == Change(path="calc.py", kind=ChangeKind.WRITTEN, data=CALC.replace(b"-", b"+"))
    assert changed["d/n.txt"].data == "é".encode()
    answered = [call.id for message in rollout.messages for call in message.calls]
    assert [message.answers for message in rollout.messages if message.role is Role.TOOL] == answered
    assert (rollout.effort["calls"], rollout.effort["errors"]) == (7, 2)
    said = rollout.effort["call_tokens"] + rollout.effort.get("final_tokens", 0)
    assert said == rollout.effort["tokens"] > 0, "what effort costs is asked of what the harness counts"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("look", {}), "there is no tool 'look'"),
        (("read", "{"), "not a JSON object"),
        (("read", {"path": "gone.py"}), "gone.py"),
        (("read", {"path": "../../etc/passwd"}), "without '..'"),
        (("read", {"path": "calc.py", "first": 9}), "has lines 1 to 2"),
        (("edit", {"path": "calc.py", "old": "a * b", "new": "a"}), "does not occur"),
        (("write", {"path": "/etc/x", "text": ""}), "must be below"),
        (("write", {"path": "x", "text": "\ud800"}), "hold what is no text"),
        (("write", {"path": "big", "text": "x" * (9 << 20)}), "MiB do not hold"),
        (("bash", {"command": "echo \0"}), "NUL"),
        (("bash", {"command": "\ud800"}), "hold what is no text"),
        (("bash", {"command": "yes"}), "printed too much"),
        (("bash", {"command": "if"}), "syntax error"),
    ],
)
async def test_what_goes_wrong_is_told_and_the_model_goes_on(tools, box, call, said):
    rollout = await tools.run(TASK, ScriptedModel(says("", call), says("", ("submit", {}))), box)
    assert (rollout.ended, len(rollout.turns)) == (Ended.SUBMITTED, 2)
    wrong, submitted = results(rollout)
    assert said in wrong
    assert submitted == "submitted"
    assert [message.failed for message in rollout.messages if message.role is Role.TOOL] == [True, False]


async def test_long_outputs_lose_their_middle(box):
    harness = open_harness("tools", {"output_chars": 300})
    rollout = await harness.run(TASK, ScriptedModel(says("", ("bash", {"command": "seq 1 900"})), says("ok")), box)
    (told,) = results(rollout)
    assert told.startswith("1\n2\n3\n")
    assert "left out here" in told
    assert told.endswith("900\n[exit 0]")
    assert len(told) < 400


async def test_the_turns_end_it(tools, box):
    look = says("", ("read", {"path": "calc.py"}))
    rollout = await tools.run(replace(TASK, turns=2), ScriptedModel(look, look), box)
    assert (rollout.ended, len(rollout.turns), len(results(rollout))) == (Ended.TURNS, 2, 2)


async def test_the_tokens_end_it(box):
    look = says("", ("read", {"path": "calc.py"}), tokens=30)
    model = ScriptedModel(look, look)
    rollout = await open_harness("tools", {"answer_tokens": 50}).run(replace(TASK, tokens=40), model, box)
    assert (rollout.ended, model.budgets) == (Ended.LENGTH, [40, 20])


async def test_a_conversation_that_outgrows_the_context_ends_with_what_was_done(tools, box):
    model = ScriptedModel(says("", ("write", {"path": "a", "text": "1"})), BadRequest("too long"))
    rollout = await tools.run(TASK, model, box)
    assert (rollout.ended, [change.path for change in rollout.changes]) == (Ended.LENGTH, ["a"])


@pytest.mark.parametrize("late", [None, says("", ("bash", {"command": "sleep 600"}))])
async def test_the_deadline_ends_it_with_what_was_done(tools, box, late):
    for path, seconds in (("a", 1.5), ("b", 6.0), ("c", 24.0)):  # until this machine gets something done in the time
        model = ScriptedModel(says("", ("write", {"path": path, "text": "1"})), late, None)
        rollout = await tools.run(replace(TASK, timeout_s=seconds), model, box)
        assert rollout.ended is Ended.TIMEOUT
        if written := path in [change.path for change in rollout.changes]:
            break
    assert written


async def test_a_command_that_takes_too_long_is_told(box):
    harness = open_harness("tools", {"command_s": 0.3})
    rollout = await harness.run(TASK, ScriptedModel(says("", ("bash", {"command": "sleep 600"})), says("ok")), box)
    assert "killed after 0.3 s" in results(rollout)[0]


async def test_a_sandbox_that_is_gone_is_raised(tools, box):
    await box.stop()
    with pytest.raises(Unavailable):
        await tools.run(TASK, ScriptedModel(says("", ("read", {"path": "calc.py"})), says("ok")), box)


async def test_a_program_that_cannot_start_is_told_as_long_as_the_sandbox_lives(tools, box, monkeypatch):
    async def refuses(*_, **__):
        raise Unavailable("the sandbox could not start the program: Resource temporarily unavailable")

    monkeypatch.setattr(box, "exec", refuses)
    model = ScriptedModel(says("", ("bash", {"command": "ls"}), ("read", {"path": "calc.py"})), says("ok"))
    rollout = await tools.run(TASK, model, box)
    ran, read = results(rollout)
    assert (rollout.ended, read) == (Ended.SUBMITTED, CALC.decode())
    assert ran.startswith("error: the sandbox could not start the program")


# ---------------------------------------------------------------- a rollout sampled anew from the middle


class Scripts:
    """A gateway whose episodes follow scripts, in turn."""

    def __init__(self, *scripts) -> None:
        self.models, self.left = [], list(scripts)

    def model(self, episode, *, group, harness, temperature=None, top_p=1.0):
        self.models.append(ScriptedModel(*self.left.pop(0)))
        self.models[-1].policies, self.models[-1].draw = (), None
        return self.models[-1]


class Written:
    """Grades by what was written."""

    async def grade(self, task, rollout):
        (change,) = rollout.changes
        return Grade(value=float(change.data == b"one\ntwo\n"))


def shell(command: str):
    return says("", ("bash", {"command": command}))


async def continued(boxes: Boxes, first: str, *then):
    """A rollout whose first call is this, and what became of it when it was sampled anew behind that, with the model that was asked."""
    gateway = Scripts((shell(first), shell("echo three >> log"), says("Done.")), then)
    shop = Workshop(harnesses={"tools": open_harness("tools")}, backend=boxes, grader=Written(), gateway=gateway)
    trying, task = RolloutAttempts(shop, pause_s=0.1), replace(TASK, harness="tools")
    tried = await trying.once(task, "w.0.0.0", "w.0", record=True)
    assert (tried.value, len(tried.turns)) == (0.0, 3)
    return tried, await trying.continued(tried, "w.0", 1, 7), gateway.models[-1]


async def test_a_failure_is_repeated_in_a_new_sandbox_and_goes_on_with_other_answers(boxes):
    tried, again, model = await continued(boxes, "echo one >> log; cat log", shell("echo two >> log"), says("Done."))
    assert again is not None
    assert (again.episode, again.value, again.turns) == ("w.0.0.0~1.7", 1.0, ("t0:0", "t1:0"))
    assert model.asked[0] == tried.rollout.messages[: len(model.asked[0])], "behind the very same messages"
    assert [message.text for message in model.asked[0] if message.role is Role.TOOL] == results(tried.rollout)[:1]
    assert again.rollout.changes == (Change(path="log", kind=ChangeKind.WRITTEN, data=b"one\ntwo\n"),)


async def test_a_failure_whose_calls_return_something_else_is_given_up_before_the_model_is_asked(boxes):
    _, again, model = await continued(boxes, "echo one >> log; head -c 16 /dev/urandom | od -x", says("Done."))
    assert again is None
    assert model.asked == []
