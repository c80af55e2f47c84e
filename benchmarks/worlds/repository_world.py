"""The world of `repository.py`: generated Python repositories, and questions whose facts are spread over their files (multi-hop retrieval).

A function returns a number or calls a function of another module, which stands further behind in reading order. A question names the
first function of a chain; a chain of n links needs n files, and its last one has the number. All names and numbers of a repository are
unique, so that an answer can neither be found by a name's likeness nor be guessed. Everything follows from a seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.sandbox import SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.memory import Memory, MemoryConfig
from ostinato.worlds.harness.rollout import Ended, Model, Rollout, harness_hash
from ostinato.worlds.tasks.task import Grading, Task

_PLACES = (
    "harbor lantern meadow copper garden winter signal bridge market castle forest silver candle rocket planet river "
    "desert island valley tunnel engine mirror window basket ladder needle pepper ribbon saddle temple violin walnut"
)
_KINDS = "store index queue cache table codec panel clock ledger router"
_VERBS = "pick weigh count fetch merge split rank trim load store scan bind fold mark pack sort sum test wrap find"
_THINGS = (
    "cargo tariff parcel ticket record sample budget report packet column filter header bucket cursor border branch "
    "region script number letter member option folder device change target source vector weight margin"
)
_FUNCTIONS = (4, 12)  # of a module, beside those of chains
_ASKED = "Which number does {name}() return?"
_REQUEST = "Notes on it so far, as `function = what it returns`; a function that it calls is looked up in turn, and ? is unknown."
_REST = "That was the whole repository."
_FINAL = "Answer with the number alone."


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A chain of facts. `names` are `module.function`, the first of which is asked for; `places` are the files (from 0) of its links."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    number: str

    @property
    def facts(self) -> tuple[str, ...]:
        """What each link's file says: the next name, and at the end the number."""
        return (*self.names[1:], self.number)

    def seen(self, files: int) -> tuple[str, ...]:
        """The facts of the first so many files, in short: functions without their modules."""
        known = [fact for fact, place in zip(self.facts, self.places, strict=True) if place < files]
        return tuple(fact.partition(".")[2] or fact for fact in known)

    def notes(self, files: int) -> str:
        """All that is known after so many files, as a row of equations. Example: ``"pick_tariff = weigh_cargo = ?"``."""
        known = self.seen(files)
        rest = () if len(known) == len(self.facts) else ("?",)
        return " = ".join((self.names[0].partition(".")[2], *known, *rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Files in reading order, by name, and chains of facts in them."""

    files: dict[str, str]
    chains: tuple[Chain, ...]

    @classmethod
    def drawn(cls, seed: int, *, characters: int, links: Sequence[int]) -> Repository:
        """A repository of at least so many characters, with a chain of each of these numbers of links.

        Raises ValueError if there are not names enough for so many files.
        """
        dice = random.Random(seed)
        modules = [f"{place}_{kind}" for place in _PLACES.split() for kind in _KINDS.split()]
        functions = [f"{verb}_{thing}" for verb in _VERBS.split() for thing in _THINGS.split()]
        numbers = [str(number) for number in range(1000, 10_000)]
        for each in (modules, functions, numbers):
            dice.shuffle(each)
        own = [[functions.pop() for _ in range(count)] for count in links]  # no other function has such a name
        bodies, size = list[list[str]](), 0
        while size < characters or len(bodies) < max(links):
            bodies.append(_module(dice, functions, numbers))
            size += sum(map(len, bodies[-1]))
            if len(bodies) > len(modules):
                raise ValueError(f"characters: {characters} take more than {len(modules)} files; ask for fewer")
        chains = list[Chain]()
        for found in own:
            places = sorted(dice.sample(range(len(bodies)), len(found)))
            names = tuple(f"{modules[place]}.{name}" for place, name in zip(places, found, strict=True))
            chains.append(Chain(names=names, places=tuple(places), number=numbers.pop()))
            for place, name, fact in zip(places, found, chains[-1].facts, strict=True):
                told = fact if fact.isdigit() else f"{fact}()"
                bodies[place].insert(dice.randrange(len(bodies[place]) + 1), f"def {name}():\n    return {told}\n")
        files = {f"{modules[n]}.py": f"# {modules[n]}.py\n" + "\n".join(body) for n, body in enumerate(bodies)}
        return cls(files=files, chains=tuple(chains))


def _module(dice: random.Random, names: Sequence[str], numbers: list[str]) -> list[str]:
    """Functions that no chain needs, some of which return numbers as well."""
    found = list[str]()
    for number, name in enumerate(dice.sample(names, dice.randint(*_FUNCTIONS))):
        thing, limit = dice.choice(_THINGS.split()), dice.randrange(2, 99)
        match number % 3:
            case 0:
                body = f"():\n    return {numbers.pop()}\n"
            case 1:
                body = f"({thing}s):\n    return [each for each in {thing}s if each.size > {limit}]\n"
            case _:
                body = f"({thing}):\n    if not {thing}:\n        raise ValueError('no {thing}')\n    return {thing}.total * {limit}\n"
        found.append(f"def {name}{body}")
    dice.shuffle(found)
    return found


def tasks_of(name: str, repository: Repository, harness: str = "reader", characters: int | None = None) -> list[Task]:
    """A task for each chain of a repository: right is an answer whose only number is the chain's. `characters`: of the files in a window,
    where the task says so and not its reader.
    """
    files = {path: text.encode() for path, text in repository.files.items()}
    return [
        Task(
            id=f"{name}-{number}",
            family=f"links-{len(chain.names)}",
            messages=(Message(role=Role.USER, text=_ASKED.format(name=chain.names[0])),),
            spec=SandboxSpec(files=files),
            grading=Grading(grader="pattern", data={"pattern": rf"^\D*(?<!\d){chain.number}(?!\d)\D*$"}),
            harness=harness,
            turns=64,
            tokens=16,
            timeout_s=36_000.0,
            about={} if characters is None else {"characters": str(characters)},
        )
        for number, chain in enumerate(repository.chains)
    ]


def parts_of(files: Sequence[str], characters: int) -> list[list[str]]:
    """Files in parts of at most so many characters, or of one file."""
    parts = list[list[str]]()
    for text in files:
        if not parts or sum(map(len, parts[-1])) + len(text) > characters:
            parts.append([])
        parts[-1].append(text)
    return parts


class RepositoryReader:
    """Implements `Harness`: shows a task's files part by part, has the window summarised after each, and asks at the end.

    The model calls nothing. A window is a part of the files, then the question, then the summary: what stands first is the same for every
    question about a repository and for every chain of a group, so that engine and trainer compute it once for all of them. For that, of
    the chains of a task that are read at once one is first at each window, and the others wait until it has its summary.
    """

    name = "reader"

    def __init__(self, characters: int, window: int = 8192, summary_tokens: int = 32) -> None:
        self.characters = characters
        self.memory = MemoryConfig(
            window=window,
            request=_REQUEST,
            think_tokens=0,
            summary_tokens=summary_tokens,
            tells=(),
            keep_last=False,
            tries=1,
            summaries=256,
        )
        self.hash = harness_hash(self.name, 1, memory=self.memory.model_dump(), characters=characters)
        self._read = dict[
            tuple[str, int], asyncio.Event
        ]()  # by task and window: set once a chain has its summary, or gave up

    def spec(self, task: Task) -> None:
        """None: it runs nothing."""

    def parts(self, task: Task) -> list[list[str]]:
        """The files of a task, by window."""
        characters = int(task.about.get("characters", self.characters))
        return parts_of([data.decode() for data in task.spec.files.values()], characters)

    def demonstrated(self, task: Task, chain: Chain) -> list[Conversation]:
        """Each window of a task with the summary that is right after right ones, and the answer at the end."""
        found, read, memory = list[Conversation](), 0, list[str]()
        parts = self.parts(task)
        for number, part in enumerate([*parts, [_REST]]):
            read += len(part)
            last = number == len(parts)
            told = ["\n".join(part), task.messages[0].text, *memory, _FINAL if last else _REQUEST]
            said = chain.number if last else chain.notes(read)
            messages = (*(Message(role=Role.USER, text=text) for text in told), Message(role=Role.ASSISTANT, text=said))
            found.append(Conversation(messages=messages))
            memory = [f"=== memory: summary ===\n{said}\n=== end of summary ==="]
        return found

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """One repository. Raises Unavailable."""
        messages, turns, effort = [Message(role=Role.USER, text=""), *task.messages], list[str](), Counter[str]()
        memory = Memory(self.memory, task, model, messages, turns, effort, room=self.memory.window)
        for number, part in enumerate(self.parts(task)):
            messages[0] = Message(role=Role.USER, text="\n".join(part))
            first = (place := (task.id, number)) not in self._read
            read = self._read.setdefault(place, asyncio.Event())
            if not first:
                await read.wait()
            try:
                await memory.summarise(lambda: {"seconds": task.timeout_s})
            finally:
                read.set()
        messages[0] = Message(role=Role.USER, text=_REST)
        asked = [*messages, Message(role=Role.USER, text=_FINAL)]
        answered = await model.ask(asked, max_tokens=task.tokens, left_s=task.timeout_s)
        turns.append(answered.turn)
        return Rollout(
            task=task.id,
            harness=f"{self.name}@{self.hash}",
            ended=Ended.SUBMITTED,
            messages=(*memory.transcript, asked[-1], answered.message),
            turns=tuple(turns),
            effort={**effort, "tokens": effort["tokens"] + answered.tokens, "turns": 1.0},
            detail={"memory": "fell back"} if memory.fell_back else {},
        )
