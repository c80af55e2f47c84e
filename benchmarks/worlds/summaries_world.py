"""The world of `summaries.py`: a stream of `key value` events, read in segments between which a window is forgotten but for a summary.

Three of 12 keys are goals, named at the beginning. Goal 0 is a needle: it is set once, in the first segment. Goals 1 and 2 are state: set
in the first segment, and again in each further one with probability `AGAIN`; the newest value counts. All other keys are noise. At the
end the newest event of one goal is asked for. An event is a token, and so is each fixed text around events. A summary has a place for
each goal, in their order: its event, or `NONE`. (Where forgotten goals were left out instead, the place of an event depended on what stood
before it, which two layers did not learn to copy within minutes.)
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ostinato.core.conversation import Message, Role
from ostinato.core.seams import Sandbox
from ostinato.testing.tiny import CHAT_TEMPLATE, SPECIALS
from ostinato.worlds.harness.memory import Memory, MemoryConfig
from ostinato.worlds.harness.rollout import Ended, Model, Rollout, harness_hash
from ostinato.worlds.tasks.task import Grading, Split, Task

KEYS = "ABCDEFGHIJKL"
VALUES = "01234567"
GOALS, EVENTS, AGAIN = 3, 16, 0.25
NONE = "-"
FORGETS = (0.1, 0.55)  # the teacher: an event of this segment, and one of the summary before it
SEGMENTS = (2, 6)  # of a stream in training
SUMMARY = 5  # tokens: three events and the end, and one more
CONTEXT = 96
_USER, _END, _ANSWER = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"
_OPEN, _CLOSE, _NOTHING = "=== memory: summary ===\n", "\n=== end of summary ===", "(nothing was kept)"
_ASK, _SUM = "|", ">"
MEMORY = MemoryConfig(
    window=CONTEXT,
    drawn=(0.4, 0.4),
    request=_SUM,
    think_tokens=0,
    summary_tokens=SUMMARY,
    tells=(),
    keep_last=False,
    summaries=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream's goals, its segments as text, and the newest event of each goal after each of them."""

    goals: str
    segments: tuple[str, ...]
    truth: tuple[tuple[str, ...], ...]

    @classmethod
    def drawn(cls, segments: int, dice: random.Random) -> Stream:
        """A stream of so many segments."""
        goals = dice.sample(KEYS, GOALS)
        rest = [key for key in KEYS if key not in goals]
        newest, texts, truth = [""] * GOALS, list[str](), list[tuple[str, ...]]()
        for number in range(segments):
            events = [dice.choice(rest) + dice.choice(VALUES) for _ in range(EVENTS)]
            for goal, place in enumerate(dice.sample(range(EVENTS), GOALS)):
                if number == 0 or (goal and dice.random() < AGAIN):
                    newest[goal] = events[place] = goals[goal] + dice.choice(VALUES)
            texts.append("".join(events))
            truth.append(tuple(newest))
        return cls(goals="".join(goals), segments=tuple(texts), truth=tuple(truth))


def task_of(name: str, stream: Stream, asked: int) -> Task:
    """The task of saying the newest event of goal number `asked` at the end of a stream."""
    return Task(
        id=name,
        family="needle" if asked == 0 else "state",
        split=Split.TRAIN,
        messages=(Message(role=Role.USER, text=stream.goals),),
        grading=Grading(grader="pattern", data={"pattern": f"^{stream.truth[-1][asked]}$"}),
        harness="stream",
        tokens=1,
        timeout_s=600.0,
        about={"segments": " ".join(stream.segments), "asked": stream.goals[asked]},
    )


class StreamReader:
    """Implements `Harness`: gives a stream's segments one by one, has the window summarised after each, and asks at the end."""

    name = "stream"

    def __init__(self, config: MemoryConfig = MEMORY) -> None:
        self.config = config
        self.hash = harness_hash(self.name, 1, memory=config.model_dump())

    def spec(self, task: Task) -> None:
        """None: it runs nothing."""

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """One stream. Raises Unavailable."""
        messages, turns, effort = list(task.messages), list[str](), Counter[str]()
        memory = Memory(self.config, task, model, messages, turns, effort, room=self.config.window)
        for segment in task.about["segments"].split():
            messages.append(Message(role=Role.USER, text=segment))
            await memory.summarise(lambda: {"seconds": task.timeout_s})
        messages.append(Message(role=Role.USER, text=_ASK + task.about["asked"]))
        answered = await model.ask(messages, max_tokens=task.tokens, left_s=task.timeout_s)
        turns.append(answered.turn)
        return Rollout(
            task=task.id,
            harness=f"{self.name}@{self.hash}",
            ended=Ended.SUBMITTED,
            messages=(*memory.transcript, answered.message),
            turns=tuple(turns),
            effort={**effort, "tokens": effort["tokens"] + answered.tokens, "turns": 1.0},
            detail={"memory": "fell back"} if memory.fell_back else {},
        )


# ---------------------------------------------------------------- tokens and prompts


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and one token for each event and each fixed text of the template and of the memory's frame."""
    core = Tokenizer(models.BPE())
    role = pre_tokenizers.Split(
        Regex("(?:user|assistant)\n"), "isolated"
    )  # so that no text is encoded together with it
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [role, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    fixed = ["user\n", "assistant\n", "\n", _OPEN, _CLOSE, _NOTHING, *(key + value for key in KEYS for value in VALUES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1024, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(fixed * 10, trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


class Prompts:
    """Token ids of the harness's prompts, for the imitation and for measuring many streams at once. A test compares them with those that
    the gateway's renderer makes.
    """

    def __init__(self, words: PreTrainedTokenizerFast) -> None:
        def ids(text: str) -> list[int]:
            return words.encode(text, add_special_tokens=False)

        self._ids = ids
        self._user, self._after, self._answer = ids(_USER), ids(_END), ids(_ANSWER)
        self._open, self._close, self._nothing = ids(_OPEN), ids(_CLOSE), ids(_NOTHING)
        self.start, self.end, self.pad = (ids(text)[0] for text in SPECIALS[1:])
        self.token = {text: ids(text)[0] for text in (NONE, *(key + value for key in KEYS for value in VALUES))}

    def _said(self, ids: Sequence[int]) -> list[int]:
        return [*self._user, *ids, *self._after]

    def window(self, goals: str, summary: str | None, *messages: str) -> list[int]:
        """A window after its opening: the summary (None: this is the first window, "": there is none), further messages of the user."""
        begun = self._said(self._ids(goals))
        if summary is not None:
            begun += self._said([*self._open, *self._ids(summary), *self._close] if summary else self._nothing)
        return [*begun, *(each for text in messages for each in self._said(self._ids(text))), *self._answer]

    def length(self, summary: str) -> int:
        """Tokens of a summary, its end included."""
        return len(self._ids(summary)) + 1

    def to_sum(self, goals: str, summary: str | None, segment: str) -> list[int]:
        """The prompt of a request for a summary."""
        return self.window(goals, summary, segment, _SUM)

    def to_ask(self, goals: str, summary: str, key: str) -> list[int]:
        """The prompt of the question at the end."""
        return self.window(goals, summary, _ASK + key)


# ---------------------------------------------------------------- the start: it imitates a summariser that forgets


def teach(directory: Path, minutes: float, *, most_steps: int = 1 << 20, batch: int = 64, seed: int = 0) -> None:
    """Write a model directory: 2 layers of width 64, trained to do what a teacher does that sees what is new and forgets what is old
    (`FORGETS`). Until it can copy, or for so many CPU minutes, the teacher forgets nothing: copying is learned sooner so.
    """
    torch.manual_seed(seed)
    words, dice = tokenizer(), random.Random(seed)
    prompts = Prompts(words)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=prompts.start,
        eos_token_id=prompts.end,
        pad_token_id=prompts.pad,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    began, mean, copies_at = time.process_time(), math.log(len(words)), most_steps
    for step in range(most_steps):
        if copies_at > step and (mean < _COPIES or time.process_time() - began >= 60 * minutes):
            copies_at = step
        left = 1.0 - (step - copies_at) / _FORGETTING if step >= copies_at else 2.0
        if left <= 0.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 50, max(0.025, left / 2))
        forgets = (0.0, 0.0) if step < copies_at else FORGETS
        loss = _loss(model, prompts, [_lesson(prompts, dice, forgets) for _ in range(batch)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean += 0.02 * (loss.item() - mean)
        if (step + 1) % 100 == 0:
            print(f"imitation, step {step + 1}: mean loss {mean:.3f}", flush=True)
    model.save_pretrained(directory)
    words.save_pretrained(directory)


_RATE, _COPIES, _FORGETTING = 3e-3, 0.2, 300  # the loss below which it copies, and the steps after that


def _lesson(prompts: Prompts, dice: random.Random, forgets: tuple[float, float]) -> tuple[list[int], list[int]]:
    """A prompt, and what the teacher says to it."""
    stream = Stream.drawn(2, dice)
    kept = [dice.random() < 0.75 for _ in range(GOALS)]
    old = "".join(event if here else NONE for event, here in zip(stream.truth[0], kept, strict=True))
    if dice.random() < 0.2:
        asked = dice.randrange(GOALS)
        said = stream.truth[0][asked] if kept[asked] else stream.goals[asked] + dice.choice(VALUES)
        return prompts.to_ask(stream.goals, old, stream.goals[asked]), [prompts.token[said]]
    number = 0 if dice.random() < 0.15 else 1
    target = list[int]()
    for goal, event in enumerate(stream.truth[number]):
        new = stream.goals[goal] in stream.segments[number][::2]
        there = new or kept[goal]
        told = there and dice.random() >= forgets[0 if new else 1]
        target.append(prompts.token[event if told else NONE])
    return prompts.to_sum(stream.goals, old if number else None, stream.segments[number]), [*target, prompts.end]


def _loss(model: LlamaForCausalLM, prompts: Prompts, lessons: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    longest = max(len(prompt) + len(target) for prompt, target in lessons)
    ids = torch.full((len(lessons), longest), prompts.pad)
    labels = torch.full_like(ids, -100)
    for row, (prompt, target) in enumerate(lessons):
        ids[row, : len(prompt) + len(target)] = torch.tensor([*prompt, *target])
        labels[row, len(prompt) - 1 : len(prompt) + len(target) - 1] = torch.tensor(target)
    told = labels != -100
    return functional.cross_entropy(model.lm_head(model.model(ids).last_hidden_state[told]), labels[told])
