"""Detects test contamination: runs of words that a file shares with what the model will be tested on.

Source: GPT-3's 13-gram overlap (2005.14165, appendix C): lower case, words only. A file with an overlap is left out as a whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

_WORDS = re.compile(r"\w+")
_DISTINCT = 5  # different words that a run must have: a table's row of zeros is not an answer


def strings(text: str) -> Iterator[str]:
    """The string values of a JSON or JSONL text, without keys, and those of JSON within a string, such as a tool call's arguments.

    Any other text is one string; those of its lines that are JSON, as in a JSONL file with a broken line, are also parsed.
    """
    rows = _values(text)
    if not rows:
        lines = [line for line in text.split("\n") if line.strip()]
        rows = [value for line in lines for value in _values(line)]
        if len(rows) < len(lines):
            rows.append(text)
    while rows:
        row = rows.pop()
        if isinstance(row, str):
            yield row
            if row.lstrip()[:1] in ("{", "["):
                rows += _values(row)
        elif isinstance(row, dict):
            rows += row.values()
        elif isinstance(row, list):
            rows += row


def _values(text: str) -> list[Any]:
    """A list of the JSON value of the text; empty if it is not JSON."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return []


TEMPLATE_RUN = 5  # words
_TEMPLATE_SHARE, _TEMPLATE_LEAST = 0.1, 3


def template_runs(texts: Iterable[str]) -> frozenset[str]:
    """The runs of five words that stand in a tenth of the different texts, and in three at least: the template that they are written in."""
    seen = set(texts)
    counts = Counter(run for text in seen for run in set(_runs(_words(text), TEMPLATE_RUN)))
    least = max(_TEMPLATE_LEAST, _TEMPLATE_SHARE * len(seen))
    return frozenset(run for run, count in counts.items() if count >= least)


def own_words(text: str, template: Collection[str]) -> str:
    """The words of a text, in lower case, outside of these runs; all of them if none is outside.

    Example: ``own_words("Answer in one short line: why?", {"answer in one short line"}) == "why"``
    """
    words = _words(text)
    starts = [at for at, run in enumerate(_runs(words, TEMPLATE_RUN)) if run in template]
    shared = {place for at in starts for place in range(at, at + TEMPLATE_RUN)}
    own = [word for place, word in enumerate(words) if place not in shared]
    return " ".join(own or words)


class OverlapIndex:
    """An index of the runs of words that no file may contain.

    Args:
        gram: words of a run.
        shortest: a string with fewer words than a run, but no fewer than this, counts as a whole.

    A run of fewer than five different words carries no information and is skipped.

    Example::

        tested = OverlapIndex(13, 8)
        tested.add("held_out.jsonl", strings(text))
        tested.within(document.text)  # ("held_out.jsonl", "def add a b return ..."), or None
    """

    def __init__(self, gram: int, shortest: int) -> None:
        self._gram, self._shortest = gram, min(shortest, gram)
        self._runs: dict[int, dict[str, tuple[str, ...]]] = {}  # by length, run -> tests

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

    def add(self, name: str, texts: Iterable[str]) -> int:
        """Add the strings of a test of this name; returns how many runs they hold, including runs already known."""
        found = 0
        for text in texts:
            words = _words(text)
            length = min(self._gram, len(words))
            if length >= self._shortest:
                runs = self._runs.setdefault(length, {})
                for run in _runs(words, length):
                    if len(set(run.split())) >= _DISTINCT:
                        known = runs.get(run, ())
                        runs[run] = known if name in known else (*known, name)
                        found += 1
        return found

    def within(self, text: str) -> tuple[str, str] | None:
        """The test and the first of its runs that the text contains; None if it contains none."""
        return next(self._matches(text), None)

    def shared(self, text: str) -> dict[str, str]:
        """Every test that shares a run with the text, with the first such run."""
        found: dict[str, str] = {}
        for name, run in self._matches(text):
            found.setdefault(name, run)
        return found

    def _matches(self, text: str) -> Iterator[tuple[str, str]]:
        words = _words(text)
        for length in sorted(self._runs, reverse=True):
            runs = self._runs[length]
            yield from ((name, run) for run in _runs(words, length) for name in runs.get(run, ()))


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


def _runs(words: list[str], length: int) -> Iterator[str]:
    return (" ".join(words[at : at + length]) for at in range(len(words) - length + 1))
