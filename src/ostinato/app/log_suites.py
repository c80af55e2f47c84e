"""Suites drawn from a run's log: held-out prompts of people, stratified and deduplicated. Also measures contamination: what training shares
with suites.

An item is a prompt exactly as it was asked: only prompts that the model's own template renders to the same tokens again are taken. Each
item names its turn and its prompt's hash. The trainer holds back turns whose prompt equals, or begins with, such a prompt (`held_out`).
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import regex

from ostinato.app.storage import model_path, rows_of
from ostinato.config import Config
from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.held_out import HeldOutPrompts, prompt_hash
from ostinato.core.records import Batch, Consent, ConsentGiven, Finish, Person, Reward, Turn
from ostinato.core.seams import Log
from ostinato.corpus.filters import CopyFinder, OverlapIndex, own_words, template_runs
from ostinato.reward.credit import of_world
from ostinato.worlds.grading.grade import MAX_PATTERN
from ostinato.worlds.grading.own import own_graders
from ostinato.worlds.tasks.rows import check_row
from ostinato.worlds.tasks.task import Grading, Split, Task
from ostinato.worlds.tasks.tasksets import load

if TYPE_CHECKING:
    from ostinato.model.renderer import HFRenderer

logger = logging.getLogger(__name__)

_BUILT_IN = {"exact": "pattern", "judge": "rubric"}
CHUNK = 200  # turns read at once
SHORTEST = 8  # fewest words by which an item can be recognised
SAMPLE = 500  # prompts from which the common template is found
LENGTHS = ("short", "medium", "long")
SHIPPED = ("demo", "demo-tab", "safety", "safety-smoke")
OnProgress = Callable[[str, int, int], None]
"""Called with the current activity, how much of it is done, and the total."""


def silent(what: str, done: int, total: int) -> None:
    """Ignore progress."""


# ---------------------------------------------------------------- prompts as messages


def open_reader(config: Config) -> HFRenderer:
    """Return the renderer of the run's model. Raises BadConfig."""
    from ostinato.model.renderer import HFRenderer

    return HFRenderer(model_path(config))


def people_wrote(reader: HFRenderer, ids: Sequence[int]) -> str:
    """Return a prompt's text without its system prompt, which all prompts of a product share; the whole text if roles cannot be told."""
    return _unshared(reader.messages_of(ids)) or reader.decode(ids)


def _unshared(messages: Iterable[Message]) -> str:
    return "\n".join(message.text for message in messages if message.role is not Role.SYSTEM)


# ---------------------------------------------------------------- drawing a suite


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDraw:
    """How a suite is drawn.

    Args:
        items: number of items.
        since: only turns that ended at this time (Unix seconds) or later.
        per_user: most items of one person, or of one session of an anonymous user.
        near: Jaccard similarity of two prompts' 5-word shingles from which they count as copies; 1: only exact copies.
        tenants: only these tenants' people; empty: everybody's.
        grade: "exact": the answer that the person liked; "judge": `worlds.judge`; or "module:function".
        seed: the random seed of the draw.
    """

    items: int = 200
    since: float = -math.inf
    per_user: int = 3
    near: float = 0.7
    tenants: tuple[str, ...] = ()
    grade: str = "judge"
    seed: int = 0

    @property
    def grader(self) -> str:
        """The grader's name in the task file."""
        return _BUILT_IN.get(self.grade, self.grade.rpartition(":")[2])


@dataclass(slots=True, kw_only=True)
class DrawnSuite:
    """The tasks of a suite. `left_out`: number of turns not taken, by reason; `strata`: number of items by length and outcome."""

    tasks: list[Task] = field(default_factory=list[Task])
    turns: int = 0
    trained: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    strata: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    turn: str
    tenant: str
    person: tuple[str, str]
    tokens: int
    reward: float | None = None
    length: str = ""

    @property
    def outcome(self) -> str:
        if self.reward is None:
            return "unrewarded"
        return "positive" if self.reward > 0 else "negative" if self.reward < 0 else "neutral"

    @property
    def stratum(self) -> tuple[str, str, str]:
        return self.tenant, self.length, self.outcome


async def draw_suite(
    log: Log, config: Config, draw: SuiteDraw, reader: HFRenderer, on_progress: OnProgress = silent
) -> DrawnSuite:
    """Draw a suite of people's prompts from the log, proportionally from strata of tenant, length and outcome. Only reads the log.

    Excluded are turns that were forgotten or cut short, chores, prompts that were trained on or are near copies of one that was, near
    copies of other items, more than `per_user` items of one person, and prompts that cannot be parsed back into messages.

    Raises NotFound if nothing is left; BadConfig for an unknown grader, or for near copies without `datasketch`.
    """
    _check_grade(draw, config)
    found = DrawnSuite()
    candidates, trained = await _candidates(log, config, draw, found)
    copies = CopyFinder(draw.near)
    sample = [each.turn for each in candidates[:SAMPLE]]
    template = template_runs([people_wrote(reader, turn.prompt_ids) async for turn in _turns(log, sample)])
    done = 0
    async for turn in _turns(log, trained):
        copies.seen(own_words(people_wrote(reader, turn.prompt_ids), template))
        done += 1
        on_progress("prompts trained on", done, len(trained))
    found.trained = done
    people, quotas = Counter[tuple[str, str]](), _quotas(candidates, draw.items)
    later: list[_Candidate] = []
    for full in (False, True):  # second pass: fill up from other strata what a stratum lacks because of copies and caps
        for each in later if full else candidates:
            if len(found.tasks) == draw.items:
                break
            if not full and not quotas[each.stratum]:
                later.append(each)
                continue
            if people[each.person] == draw.per_user:
                found.left_out["of one person"] += 1
                continue
            task = await _task(log, each, draw, reader, found.left_out)
            own = "" if task is None else own_words(_unshared(task.messages), template)
            if task is not None and copies.seen(own):
                found.left_out["copy"] += 1
            elif task is not None:
                found.tasks.append(task)
                found.strata[task.family] += 1
                people[each.person] += 1
                quotas[each.stratum] -= not full
                on_progress("items", len(found.tasks), draw.items)
    if not found.tasks:
        why = ", ".join(f"{count} {reason}" for reason, count in found.left_out.most_common()) or "no turns of people"
        raise NotFound(
            f"no prompt of the log can be an item ({why}); widen --since, or choose another --grade or --near"
        )
    return found


def _check_grade(draw: SuiteDraw, config: Config) -> None:
    from ostinato.app.worlds import GRADERS  # imports the sandboxes

    if ":" in draw.grade:
        own_graders({draw.grader: draw.grade}, GRADERS)
    elif draw.grade not in _BUILT_IN:
        raise BadConfig(f"--grade {draw.grade!r}: choose {', '.join(_BUILT_IN)}, or your own as module:function")
    elif draw.grade == "judge" and config.worlds.judge is None:
        raise BadConfig(
            "--grade judge needs a model that judges: set [worlds.judge], or choose --grade exact or your own module:function"
        )


async def _candidates(
    log: Log, config: Config, draw: SuiteDraw, found: DrawnSuite
) -> tuple[list[_Candidate], list[str]]:
    """Return the turns that may be drawn, shuffled, each with its stratum, and the ids of people's turns that were trained on."""
    allowed: dict[str, _Candidate] = {}
    people: set[str] = set()
    trained: list[str] = []
    rewards: dict[str, float] = {}
    refused = await _refused(log)
    async for _, row in log.read(await log.horizon(), {Turn, Reward, Batch}):
        match row:
            case Turn() if not of_world(row) and row.arm.people:
                people.add(row.id)
                if row.ended_at < draw.since or (draw.tenants and row.tenant not in draw.tenants):
                    continue
                if why := "no consent" if row.person in refused else _unsuited(row, config):
                    found.left_out[why] += 1
                    continue
                person = row.person if row.user != ANONYMOUS else (row.tenant, row.episode)
                tokens = len(row.prompt_ids)
                allowed[row.id] = _Candidate(turn=row.id, tenant=row.tenant, person=person, tokens=tokens)
            case Reward():
                rewards[row.turn] = row.value
            case Batch():
                trained += row.turns
            case _:
                pass
    found.turns = len(allowed)
    for turn in trained:
        found.left_out["trained on"] += allowed.pop(turn, None) is not None
    edges = np.quantile([each.tokens for each in allowed.values()], [1 / 3, 2 / 3]) if allowed else np.zeros(2)
    strata: list[_Candidate] = []
    for each in allowed.values():
        length = LENGTHS[int(np.searchsorted(edges, each.tokens))]
        strata.append(replace(each, reward=rewards.get(each.turn), length=length))
    random.Random(draw.seed).shuffle(strata)
    return strata, [turn for turn in trained if turn in people]


async def _refused(log: Log) -> set[Person]:
    """Return the people whose latest recorded consent does not allow learning."""
    found: dict[Person, Consent] = {}
    async for row in rows_of(log, ConsentGiven):
        found[row.person] = row.level
    return {person for person, level in found.items() if level is not Consent.YES}


def _unsuited(turn: Turn, config: Config) -> str:
    """Return why a person's turn is no candidate; "" if it is one."""
    if turn.consent is not Consent.YES:
        return "no consent"
    if turn.redacted or not turn.prompt_ids:
        return "forgotten"
    if not turn.finish.trainable or turn.finish.cut or turn.finish is Finish.LEFT:
        return "cut short"
    if turn.secret:
        return "holds a secret"
    return "" if turn.purpose in config.reward.purposes else "a chore"


def _quotas(candidates: Sequence[_Candidate], items: int) -> dict[tuple[str, str, str], int]:
    """Apportion the items to strata in proportion to their candidates (largest remainder method)."""
    sizes = Counter(each.stratum for each in candidates)
    share = min(1.0, items / max(1, len(candidates)))
    quotas = {stratum: int(size * share) for stratum, size in sizes.items()}
    rest = min(items, len(candidates)) - sum(quotas.values())
    for stratum in sorted(sizes, key=lambda stratum: (quotas[stratum] - sizes[stratum] * share, stratum))[:rest]:
        quotas[stratum] += 1
    return quotas


async def _task(log: Log, each: _Candidate, draw: SuiteDraw, reader: HFRenderer, left_out: Counter[str]) -> Task | None:
    found = await log.find(Turn, [(each.turn,)])
    if not found or found[0].redacted:
        left_out["forgotten"] += 1
        return None
    turn = found[0]
    conversation = reader.conversation_of(turn.prompt_ids)
    if conversation is None:
        left_out["not read back"] += 1
        return None
    grading = _grading(draw, turn, each.reward)
    if isinstance(grading, str):
        left_out[grading] += 1
        return None
    hash = prompt_hash(turn.prompt_ids)
    task = Task(
        id=f"log-{hash[:16]}",
        family=f"{each.length}-{each.outcome}",
        messages=conversation.messages,
        grading=grading,
        split=Split.HELD_OUT,
        tokens=turn.sampling.max_tokens,
        stop=turn.sampling.stop,
        temperature=turn.sampling.temperature,
        top_p=turn.sampling.top_p,
        about={"turn": turn.id, "prompt": hash, "tokens": str(len(turn.prompt_ids))},
    )
    try:
        check_row(f"turn {turn.id}", task, {})
    except BadConfig:
        left_out["not fit for a task file"] += 1
        return None
    return task


def _grading(draw: SuiteDraw, turn: Turn, reward: float | None) -> Grading | str:
    """Return how an answer to a turn's prompt is graded, or the reason why it cannot be."""
    if draw.grade == "judge":
        return Grading(grader=draw.grader, timeout_s=120.0)
    if draw.grade != "exact":
        return Grading(grader=draw.grader, data={"answer": turn.text, "reward": reward})
    pattern = rf"\A\s*{regex.escape(turn.text.strip())}\s*\Z"
    if reward is None or reward <= 0 or not turn.text.strip():
        return "no answer that was liked"
    return Grading(grader=draw.grader, data={"pattern": pattern}) if len(pattern) <= MAX_PATTERN else "answer too long"


async def _turns(log: Log, ids: Sequence[str]) -> AsyncIterator[Turn]:
    """Yield the turns with these ids that can still be read."""
    for start in range(0, len(ids), CHUNK):
        for turn in await log.find(Turn, [(id,) for id in ids[start : start + CHUNK]]):
            if not turn.redacted:
                yield turn


# ---------------------------------------------------------------- held-out prompts


def suite_files(config: Config) -> tuple[str, ...]:
    """Return the task files that candidates are evaluated on, each once, without the suites that ship with Ostinato."""
    settings = config.evaluate
    bars = [bar.suite or bar.taskset for bar in settings.bars]
    of_tenants = [file for files in settings.tenant_suites.values() for file in files]
    files = dict.fromkeys([settings.suite, *settings.further_suites, *settings.tasksets, *of_tenants, *bars])
    return tuple(file for file in files if file and file not in SHIPPED)


def held_out_prompts(config: Config) -> HeldOutPrompts:
    """Return the prompts that the suites' items name. A file missing on this machine is logged, and its prompts are not held back."""
    return HeldOutPrompts(_noted_prompts(suite_files(config)))


def _noted_prompts(files: Iterable[str]) -> Iterator[tuple[int, str]]:
    for file in files:
        path = Path(file).expanduser()
        if not path.is_file():
            logger.warning("suite %s is not on this machine: its prompts are not held out of training", file)
            continue
        for task in load(path.resolve()).tasks:
            if {"prompt", "tokens"} <= task.about.keys() and task.about["tokens"].isdecimal():
                yield int(task.about["tokens"]), task.about["prompt"]


# ---------------------------------------------------------------- contamination


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """An item of a suite that shares a run of words with turns that were trained on. `turn` is one of these `turns`.

    Example: ``SharedRun(item="answers: add-1", run="write a function that ...", turns=3, turn="chatcmpl-3f:0")``
    """

    item: str
    run: str
    turns: int
    turn: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contamination:
    """What suites share with people's turns that were trained on, most shared first. `items` and `turns`: how many were compared. `short`:
    items with too few words of their own to be recognised.
    """

    shared: tuple[SharedRun, ...]
    items: int
    turns: int
    short: int


async def contamination(
    log: Log,
    tasks: Mapping[str, Sequence[Task]],
    reader: HFRenderer,
    *,
    gram: int = 13,
    on_progress: OnProgress = silent,
) -> Contamination:
    """Return the items that share `gram` consecutive words with people's turns that were trained on. `tasks`: held-out tasks by suite.

    An item's text is its messages without the system prompt and without the template that at least a tenth of a suite's items share, plus
    its grading data. A text shorter than `gram` words is compared as a whole, from eight words on.
    """
    index = OverlapIndex(gram, SHORTEST)
    templates: set[str] = set()
    short = 0
    for suite, items in tasks.items():
        template = template_runs(_unshared(task.messages) for task in items)
        templates |= template
        for task in items:
            data = [value for value in task.grading.data.values() if isinstance(value, str)]
            texts = [own_words(_unshared(task.messages), template), *data]
            short += not index.add(f"{suite}: {task.id}", texts)
    trained = [turn async for row in rows_of(log, Batch) for turn in row.turns]
    shared: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    done = 0
    async for turn in _turns(log, trained):
        if of_world(turn):
            continue
        done += 1
        said = f"{own_words(people_wrote(reader, turn.prompt_ids), templates)}\n{turn.text}"
        for item, run in index.shared(said).items():
            shared[item].append((turn.id, run))
        on_progress("turns trained on", done, len(trained))
    found = [SharedRun(item=item, run=of[0][1], turns=len(of), turn=of[0][0]) for item, of in shared.items()]
    found.sort(key=lambda each: (-each.turns, each.item))
    return Contamination(shared=tuple(found), items=sum(map(len, tasks.values())), turns=done, short=short)
