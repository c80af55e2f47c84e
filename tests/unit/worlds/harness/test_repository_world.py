"""The world of repositories longer than a window: facts lie where they are said to, answers are graded exactly, notes lead to them."""

import asyncio
import re

import pytest
from benchmarks.worlds.repository_world import Repository, RepositoryReader, parts_of, tasks_of
from tests.deadlines import PATIENT_S
from tests.fakes.scripted_model import ScriptedModel, says

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import Unavailable
from ostinato.core.records import Purpose
from ostinato.worlds.grading.grade import PatternGrader
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.tasksets import taskset_of

LINKS = (1, 2, 3)


def drawn(seed=5, characters=9000):
    return Repository.drawn(seed, characters=characters, links=LINKS)


def followed(repository, chain):
    """A chain's number, found as a program would: by looking up each function in the module that its caller names."""
    name = chain.names[0]
    for _ in range(len(chain.names)):
        module, function = name.split(".")
        (found,) = re.findall(
            rf"^def {function}\(\):\n    return (.+)\n", repository.files[f"{module}.py"], re.MULTILINE
        )
        name = found.removesuffix("()")
    return name


def test_a_seed_decides_everything_and_a_chain_leads_through_later_files_to_its_number():
    repository = drawn()
    assert repository == drawn() != drawn(seed=6)
    assert sum(map(len, repository.files.values())) >= 9000
    text = "\n".join(repository.files.values())
    for chain, links in zip(repository.chains, LINKS, strict=True):
        assert len(chain.names) == links
        assert list(chain.places) == sorted(set(chain.places))
        assert followed(repository, chain) == chain.number
        assert len(re.findall(rf"\b{chain.number}\b", text)) == 1
        paths = list(repository.files)
        for name, place in zip(chain.names, chain.places, strict=True):
            module, function = name.split(".")
            assert paths[place] == f"{module}.py"
            assert len(re.findall(rf"^def {function}\(", text, re.MULTILINE)) == 1


def test_a_long_repository_holds_every_file_once_in_windows_of_their_size():
    files = list(drawn(characters=128_000).files.values())
    assert sum(map(len, files)) >= 128_000
    parts = parts_of(files, 20_000)
    assert [text for part in parts for text in part] == files
    assert all(len("\n".join(part)) <= 20_000 + len(part) for part in parts)
    assert len(parts) >= 7
    with pytest.raises(ValueError, match="ask for fewer"):
        drawn(characters=400_000)
    assert parts_of(["too long for a window", "b"], 5) == [["too long for a window"], ["b"]]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("{n}", 1.0),
        ("It returns {n}.", 1.0),
        ("{n}0", 0.0),
        ("1{n}", 0.0),
        ("{n} or 1234", 0.0),
        ("{n} {n}", 0.0),
        ("", 0.0),
    ],
)
async def test_right_is_an_answer_whose_only_number_is_the_chain_s(answer, value):
    repository = drawn()
    for task, chain in zip(tasks_of("r", repository), repository.chains, strict=True):
        said = Message(role=Role.ASSISTANT, text=answer.format(n=chain.number))
        rollout = Rollout(task=task.id, harness="h", ended=Ended.SUBMITTED, messages=(said,), turns=())
        assert (await PatternGrader().grade(task, rollout)).value == value


async def test_whose_notes_are_right_is_shown_every_file_once_with_its_last_notes_and_answers_right():
    repository, reader = drawn(), RepositoryReader(3000)
    tasks = taskset_of("repositories", tasks_of("r", repository)).tasks
    shared = []
    for task, chain in zip(tasks, repository.chains, strict=True):
        shown = reader.demonstrated(task, chain)
        model = ScriptedModel(*(says(each.messages[-1].text) for each in shown))
        rollout = await reader.run(task, model, None)
        assert model.asked == [each.messages[:-1] for each in shown], "what it is asked is what it was shown"
        assert model.purposes == [Purpose.COMPACTION] * (len(shown) - 1) + [Purpose.TASK]
        assert (await PatternGrader().grade(task, rollout)).value == 1.0
        assert not any(chain.number in message.text for message in model.asked[-1][:2]), "only the notes know it"
        shared.append([asked[0].text for asked in model.asked])
    assert shared[0] == shared[1] == shared[2], "what stands first does not depend on the question"
    assert "\n".join(shared[0][:-1]) == "\n".join(repository.files.values())


def test_notes_tell_what_the_files_so_far_have_told():
    (_, chain, _) = drawn().chains
    first, last = chain.places
    names = [name.split(".")[1] for name in chain.names]
    assert chain.notes(first) == f"{names[0]} = ?"
    assert chain.notes(first + 1) == f"{names[0]} = {names[1]} = ?"
    assert chain.notes(last + 1) == f"{names[0]} = {names[1]} = {chain.number}"
    assert [chain.seen(files) for files in (first, first + 1, last + 1)] == [(), (names[1],), (names[1], chain.number)]


def test_a_task_may_say_how_much_of_its_files_a_window_holds():
    (task, *_), (other, *_) = tasks_of("r", drawn(), characters=2000), tasks_of("r", drawn())
    reader = RepositoryReader(5000)
    assert reader.parts(task) == RepositoryReader(2000).parts(other) != reader.parts(other)


class Watched(ScriptedModel):
    """Notes how many windows had a summary when each of its own was asked for. Its first answer may never come."""

    def __init__(self, summed, fails=False):
        super().__init__(*(says("x") for _ in range(9)))
        self.summed, self.fails, self.seen = summed, fails, []

    async def ask(self, messages, tools=(), **options):
        self.seen.append(len(self.summed))
        await asyncio.sleep(0)
        if self.fails:
            raise Unavailable("the gateway is gone")
        answered = await super().ask(messages, tools, **options)
        self.summed.append(messages[0].text)
        return answered


async def test_of_the_chains_of_a_task_one_reads_a_window_first_and_the_others_find_its_prefix():
    reader, (task, *_), summed = RepositoryReader(5000), tasks_of("r", drawn()), []
    models = [Watched(summed) for _ in range(3)]
    await asyncio.gather(*(reader.run(task, model, None) for model in models))
    assert models[0].seen[0] == 0
    assert all(model.seen[0] >= 1 for model in models[1:]), "they wait for the first one's summary"
    assert models[1].seen[0] == models[2].seen[0], "and then go on together"


async def test_who_reads_first_and_fails_holds_up_nobody():
    reader, (task, *_), summed = RepositoryReader(5000), tasks_of("r", drawn()), []
    runs = [reader.run(task, Watched(summed, fails=not n), None) for n in range(2)]
    failed, done = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), PATIENT_S)
    assert isinstance(failed, Unavailable)
    assert done.ended is Ended.SUBMITTED
