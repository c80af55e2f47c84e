"""Classifies what a person's next message says about the answer before it, by rules. Pure; English only.

The rules prefer misses to false positives: a message that matches none of them means only that the conversation went on. So most rules look
at how a sentence or a part of it begins: "it fails" is a complaint, "what if it fails?" and "test that it fails" are not. The rules'
version is recorded with each signal, so that signals from different versions can be told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from ostinato.serve.feedback import phrases

VERSION = "rules@2"
_MOST_WORDS = 60  # words that are read: displeasure shows early, and longer text is mostly pasted material
_MOST_CHARS = 800
_MOST_WARM = 10  # most words of a message that only praises
_MOST_CROSS = 40  # most words of a complaint or correction: a longer message has another purpose
_FEWEST = 3  # fewest meaningful words with which a request can be recognised as a repetition
_SENTENCES = re.compile(r"([.!?]+)(?=\s|$)|\n+")
_PARTS = re.compile(r"[,;:()]+(?=\s|$)|\s(?=\()|\s-+\s|\s*[\u2013\u2014]\s*")
_QUOTED = re.compile(r"\"[^\"\n]*\"|\u201c[^\u201d\n]*\u201d|`[^`\n]*`")
_NOISE = re.compile(r"[^\w' ]+")
_SPACES = re.compile(r"\s+")
_SHORTENED = re.compile(r"\b(do|does|did|is|was|are|were|has|have|had|ca|could|wo|would|should)(?:n'?t)\b")
_IS = re.compile(r"\b(it|that|this|there|here|what|he|she)'s\b")


class NextMessage(StrEnum):
    """The kind of a next message. `GOES_ON`: no rule matches."""

    RETRY = "retry"
    CORRECTION = "correction"
    COMPLAINT = "complaint"
    PRAISE = "praise"
    TOPIC = "new topic"
    GOES_ON = "goes on"


DISSATISFIED = frozenset({NextMessage.RETRY, NextMessage.CORRECTION, NextMessage.COMPLAINT})


class _Part(NamedTuple):
    """A part of a sentence, normalised by `_plain`; `asks`: the sentence is a question."""

    words: str
    asks: bool


def kind_of(message: str, before: str, answer: str = "") -> NextMessage:
    """The kind of a message that followed `answer` to the request `before`; all as the person typed or saw them.

    If the answer ended in a question, "no" and "not that" are replies to it and not corrections.

    Example: ``kind_of("No, use pathlib instead.", "Read the file.") is NextMessage.CORRECTION``
    """
    parts = list(_parts_of(message))
    if not parts:
        return NextMessage.GOES_ON
    first = parts[0].words
    whole = " ".join(part.words for part in parts)
    asked = _asks(answer)
    if phrases.RETRY.search(whole) or _same(message, before):
        return NextMessage.RETRY
    if _praises(whole, parts):
        return NextMessage.PRAISE
    if any(phrases.TOPIC.search(words) for words in (whole, *(part.words for part in parts[:2]))):
        return NextMessage.TOPIC
    if len(whole.split()) > _MOST_CROSS or phrases.UNCLEAR.search(whole):
        return NextMessage.GOES_ON
    if any(_complains(part) for part in parts):
        return NextMessage.COMPLAINT
    if _corrects(first, parts, whole, asked=asked):
        return NextMessage.CORRECTION
    return NextMessage.GOES_ON


def _complains(part: _Part) -> bool:
    if part.asks and not part.words.startswith("why "):
        return False
    return phrases.COMPLAINT.search(part.words) is not None


def _corrects(first: str, parts: Sequence[_Part], whole: str, *, asked: bool) -> bool:
    """True if the message changes what was done. A question does not, unless it asks to take something back."""
    if parts[0].asks and len(parts) == 1:
        return phrases.TAKING_BACK.search(first) is not None and bool(phrases.CORRECTION.search(first))
    if not asked and ((phrases.NO.search(whole) and len(whole.split()) > 1) or phrases.NOT.search(first)):
        return True
    if any(phrases.CORRECTION.search(words) for words in (first, whole)) and not (
        asked and first.startswith(("not", "no "))
    ):
        return True
    return not asked and any(
        phrases.OPPOSING.search(one.words) and phrases.OPPOSED.search(other.words) and not other.asks
        for one, other in pairwise(parts[:2])
    )


def _praises(whole: str, parts: Sequence[_Part]) -> bool:
    words = whole.split()
    asks = any(part.asks for part in parts)
    return (
        not asks
        and len(words) <= _MOST_WARM
        and phrases.THANKS.search(whole) is not None
        and phrases.WARM.issuperset(words)
    )


def _asks(answer: str) -> bool:
    """True if an answer ends in a question."""
    return answer.rstrip(" \t\n\"'`*_)]}").endswith("?")


def _same(message: str, before: str) -> bool:
    """True if two requests have enough meaningful words and differ only in words without meaning."""
    one, other = ([word for word in _plain(text).split() if word not in phrases.EMPTY] for text in (message, before))
    return len(one) >= _FEWEST and one == other


def _parts_of(message: str) -> Iterator[_Part]:
    """The parts of its sentences, up to about `_MOST_WORDS` words; quoted text is left out, as it is not the person's own."""
    bare = _QUOTED.sub(" ", message[:_MOST_CHARS].replace("\u2019", "'"))
    left, at = _MOST_WORDS, 0
    for end in (*_SENTENCES.finditer(bare), None):
        sentence = bare[at : end.start()] if end else bare[at:]
        asks = end is not None and "?" in end.group()
        at = end.end() if end else len(bare)
        for piece in _PARTS.split(sentence):
            words = _plain(piece)
            if words and left > 0:
                left -= len(words.split())
                yield _Part(words, asks)


def _plain(text: str) -> str:
    """Lower case, one line, without punctuation; short forms such as "doesn't" and "dont" in full."""
    lowered = _SHORTENED.sub(r"\1 not", text.lower().replace("\u2019", "'"))
    lowered = lowered.replace("ca not", "can not").replace("wo not", "will not")
    lowered = (
        _IS.sub(r"\1 is", lowered)
        .replace("i'm ", "i am ")
        .replace("you're ", "you are ")
        .replace("i'd ", "i would ")
        .replace("let's", "let us")
        .replace("lets ", "let us ")
    )
    return _SPACES.sub(" ", _NOISE.sub(" ", lowered)).strip().replace(" '", " ")
