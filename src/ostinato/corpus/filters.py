"""Filters of a corpus: licences, file content, exact and near duplicates, and test contamination.

Licences: a package's metadata decides whether its licence permits training without conditions on the result. An unknown or missing licence
does not. Duplicates: the first copy is kept, so the result depends only on the files and their order. Source: MinHash over word shingles
with locality-sensitive hashing (Broder 1997), as BigCode deduplicates code (2301.03988).

Test contamination: a file that shares an n-gram of words with a test is left out as a whole. Source: GPT-3's 13-gram overlap (2005.14165,
appendix C): lower case, words only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ostinato.core.errors import BadConfig
from ostinato.corpus.config import CorpusConfig

# ---------------------------------------------------------------- licences


PERMISSIVE = {
    "0bsd", "apache-2.0", "blueoak-1.0.0", "bsd-1-clause", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc0-1.0", "cnri-python",
    "hpnd", "isc", "mit", "mit-0", "mit-cmu", "ncsa", "postgresql", "psf-2.0", "python-2.0", "python-2.0.1", "unlicense", "upl-1.0",
    "x11", "zlib", "zpl-2.1",
}  # fmt: skip
"""SPDX identifiers of permissive licences, in lower case."""

_CLASSIFIERS = {
    "apache software license": "apache-2.0",
    "bsd license": "bsd-3-clause",
    "boost software license 1.0 (bsl-1.0)": "bsl-1.0",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "cc0-1.0",
    "historical permission notice and disclaimer (hpnd)": "hpnd",
    "isc license (iscl)": "isc",
    "mit license": "mit",
    "mit no attribution license (mit-0)": "mit-0",
    "python software foundation license": "psf-2.0",
    "the unlicense (unlicense)": "unlicense",
    "universal permissive license (upl)": "upl-1.0",
    "zero-clause bsd (0bsd)": "0bsd",
    "zlib/libpng license": "zlib",
    "zope public license": "zpl-2.1",
}
_FREE_TEXT = {
    "apache": "apache-2.0", "apache 2": "apache-2.0", "apache 2.0": "apache-2.0", "apache license 2.0": "apache-2.0",
    "apache license, version 2.0": "apache-2.0", "apache software license": "apache-2.0", "bsd": "bsd-3-clause",
    "bsd license": "bsd-3-clause", "3-clause bsd": "bsd-3-clause", "bsd 3-clause": "bsd-3-clause", "new bsd": "bsd-3-clause",
    "isc license": "isc", "mit license": "mit", "the mit license": "mit", "psf": "psf-2.0",
}  # fmt: skip
_SPDX = re.compile(r"\(|\)|[A-Za-z0-9.+-]+")


def permissive_licence(metadata: Mapping[str, Sequence[str]]) -> tuple[str, bool]:
    """Return the licence that a package's core metadata states, and whether it is permissive.

    `metadata`: field name -> values, such as {"License-Expression": ["MIT"], "Classifier": [...], "License": [...]}. An expression takes
    precedence over classifiers, and classifiers over free text. If there are several classifiers, all must be permissive.

    Example: ``permissive_licence({"License-Expression": ["MIT OR GPL-2.0-only"]})`` is ``("MIT OR GPL-2.0-only", True)``.
    """
    for expression in metadata.get("License-Expression", ()):
        return expression, allows(expression)
    stated = [each for each in metadata.get("Classifier", ()) if each.startswith("License ::")]
    named = [each.rpartition("::")[2].strip() for each in stated if each.count("::") > 1 or "OSI" not in each]
    if named:
        return ", ".join(named), all(each.lower() in _CLASSIFIERS for each in named)
    for text in metadata.get("License", ()):
        short = " ".join(text.split())
        if len(short) <= 80 and short:
            return short, short.lower() in _FREE_TEXT or allows(short)
    return "none stated", False


def allows(expression: str) -> bool:
    """Return True if an SPDX expression can be satisfied by permissive licences: one side of an OR, both sides of an AND.

    An exception (WITH) only adds permissions and is ignored. Unknown licences and malformed expressions give False.

    Example: ``allows("(MIT OR GPL-3.0-only) AND BSD-3-Clause")`` is True.
    """
    words = _SPDX.findall(expression)
    if "".join(words) != "".join(expression.split()):
        return False
    try:
        holds, rest = _parse_or(words)
    except (IndexError, RecursionError):
        return False
    return holds and not rest


def _parse_or(words: list[str]) -> tuple[bool, list[str]]:
    holds, rest = _parse_and(words)
    while rest and rest[0].upper() == "OR":
        other, rest = _parse_and(rest[1:])
        holds = holds or other
    return holds, rest


def _parse_and(words: list[str]) -> tuple[bool, list[str]]:
    holds, rest = _parse_term(words)
    while rest and rest[0].upper() == "AND":
        other, rest = _parse_term(rest[1:])
        holds = holds and other
    return holds, rest


def _parse_term(words: list[str]) -> tuple[bool, list[str]]:
    if words[0] == "(":
        holds, rest = _parse_or(words[1:])
        return holds and rest[0] == ")", rest[1:]
    rest = words[1:]
    if rest and rest[0].upper() == "WITH":
        rest = rest[2:]
    return words[0].lower() in PERMISSIVE, rest


# ---------------------------------------------------------------- file content


_SECRETS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36}\b|\bsk-[A-Za-z0-9_-]{32,}\b"
    r"|\bxox[abprs]-[A-Za-z0-9-]{20,}|\bAIza[0-9A-Za-z_-]{35}\b|\bpypi-[A-Za-z0-9_-]{60,}|\bglpat-[A-Za-z0-9_-]{20}\b"
)
_GENERATED = re.compile(r"@generated|generated by|do not edit|autogenerated|auto-generated", re.IGNORECASE)
_HEAD = 400  # characters that are searched for a generator's mark
_NOTICE = 2000  # characters that are searched for the file's own licence
_IDENTIFIER = re.compile(r"SPDX-License-Identifier:[ \t]*([A-Za-z0-9.+() -]+)")
_GNU = re.compile(
    r"under[\s#*]+the[\s#*]+terms[\s#*]+of[\s#*]+the[\s#*]+GNU|\A\s*GNU\s+(?:\w+\s+)?GENERAL\s+PUBLIC\s+LICENSE",
    re.IGNORECASE,
)


def text_of(data: bytes, config: CorpusConfig) -> tuple[str, str]:
    """Return (text, "") for a file to keep, or ("", reason): size, encoding, long line, data, generated, licence or secret."""
    if not config.least_bytes <= len(data) <= config.most_bytes:
        return "", "size"
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return "", "encoding"
    reasons = {
        "encoding": "\0" in text,
        "long line": max(map(len, text.split("\n"))) > config.longest_line,
        "data": sum(map(str.isalpha, text)) < config.least_letters * len(text),
        "generated": _GENERATED.search(text[:_HEAD]) is not None,
        "licence": not _notice_permits(text[:_NOTICE]),
        "secret": _SECRETS.search(text) is not None,
    }
    reason = next((name for name, holds in reasons.items() if holds), "")
    return ("", reason) if reason else (text, "")


def _notice_permits(head: str) -> bool:
    """Return True unless the file's own licence notice forbids its use: a file of a permissive package may have another licence."""
    stated = [found.rstrip(" -") for found in _IDENTIFIER.findall(head)]
    return all(map(allows, stated)) and _GNU.search(head) is None


# ---------------------------------------------------------------- duplicates


def digest_of(text: str) -> int:
    """Return 63 bits of the text's BLAKE2b hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


SHINGLE = 5  # words
_PERMUTATIONS = 128  # standard error of the estimate at a similarity of 0.7: 0.04
# LSH weights of false positives and false negatives; a false positive is cheap, since each candidate is compared
_LSH_WEIGHTS = (0.1, 0.9)
_WORDS = re.compile(r"\w+")


def shingles(text: str) -> set[str]:
    """Return all 5-grams of words; the whole text if it has fewer words."""
    words = _WORDS.findall(text)
    return {" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))}


class CopyFinder:
    """Finds exact and near duplicates of earlier texts.

    Args:
        near: the Jaccard similarity from which a text counts as a near duplicate; 1: exact duplicates only.

    Raises BadConfig if `datasketch` is missing and `near` is below 1.

    Example: ``CopyFinder(0.7).seen(text)`` is False for the first text.
    """

    def __init__(self, near: float) -> None:
        self._near = near
        self._exact = set[int]()
        self._hashes: list[Any] = []  # MinHash of each text in the index, by its key
        self._index: Any = None
        if near < 1:
            try:
                from datasketch import MinHashLSH
            except ImportError as error:
                raise BadConfig(
                    "finding near copies needs datasketch: pip install 'ostinato[corpus]', or give --near 1 for exact copies only"
                ) from error
            self._index = MinHashLSH(threshold=near, num_perm=_PERMUTATIONS, weights=_LSH_WEIGHTS)

    def seen(self, text: str) -> bool:
        """Return True for a duplicate of an earlier text. Otherwise remember the text."""
        digest = digest_of(text)
        if digest in self._exact or (self._index is not None and self._similar(text)):
            return True
        self._exact.add(digest)
        return False

    def _similar(self, text: str) -> bool:
        """Return True for a near duplicate. Otherwise put the text into the index."""
        from datasketch import MinHash

        hashed = MinHash(num_perm=_PERMUTATIONS)
        hashed.update_batch([each.encode() for each in shingles(text)])
        if any(hashed.jaccard(self._hashes[each]) >= self._near for each in self._index.query(hashed)):
            return True
        self._index.insert(len(self._hashes), hashed, check_duplication=False)
        self._hashes.append(hashed)
        return False


# ---------------------------------------------------------------- test contamination

_DISTINCT = 5  # fewest distinct words of an n-gram: a table's row of zeros is not an answer


def strings(text: str) -> Iterator[str]:
    """Yield the string values of a JSON or JSONL text, without keys. JSON inside a string (a tool call's arguments) is parsed too.

    Any other text is yielded whole, and those of its lines that are JSON are also parsed, as in a JSONL file with a broken line.
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
    """Return [value] for a JSON text, [] for any other."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return []


TEMPLATE_RUN = 5  # words
_TEMPLATE_SHARE, _TEMPLATE_LEAST = 0.1, 3


def template_runs(texts: Iterable[str]) -> frozenset[str]:
    """Return the texts' template: the 5-grams of words in at least a tenth of the distinct texts, and in at least three."""
    seen = set(texts)
    counts = Counter(run for text in seen for run in set(_runs(_words(text), TEMPLATE_RUN)))
    least = max(_TEMPLATE_LEAST, _TEMPLATE_SHARE * len(seen))
    return frozenset(run for run, count in counts.items() if count >= least)


def own_words(text: str, template: Collection[str]) -> str:
    """Return the lower-case words of a text outside the 5-grams in `template`; all words if none is outside.

    Example: ``own_words("Answer in one short line: why?", {"answer in one short line"}) == "why"``
    """
    words = _words(text)
    starts = [at for at, run in enumerate(_runs(words, TEMPLATE_RUN)) if run in template]
    shared = {place for at in starts for place in range(at, at + TEMPLATE_RUN)}
    own = [word for place, word in enumerate(words) if place not in shared]
    return " ".join(own or words)


class OverlapIndex:
    """An n-gram index of test texts, for finding test contamination.

    Args:
        gram: words per n-gram.
        shortest: a string with fewer words than `gram`, but at least this many, is indexed as a whole.

    An n-gram with fewer than five distinct words carries no information and is skipped.

    Example::

        tested = OverlapIndex(13, 8)
        tested.add("held_out.jsonl", strings(text))
        tested.within(document.text)  # ("held_out.jsonl", "def add a b return ..."), or None
    """

    def __init__(self, gram: int, shortest: int) -> None:
        self._gram, self._shortest = gram, min(shortest, gram)
        self._runs: dict[int, dict[str, tuple[str, ...]]] = {}  # length -> n-gram -> names of tests

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

    def add(self, name: str, texts: Iterable[str]) -> int:
        """Index the strings of a test. Return the number of their n-grams, including those indexed before."""
        count = 0
        for text in texts:
            words = _words(text)
            length = min(self._gram, len(words))
            if length >= self._shortest:
                runs = self._runs.setdefault(length, {})
                for run in _runs(words, length):
                    if len(set(run.split())) >= _DISTINCT:
                        known = runs.get(run, ())
                        runs[run] = known if name in known else (*known, name)
                        count += 1
        return count

    def within(self, text: str) -> tuple[str, str] | None:
        """Return (test, shared n-gram) for the first match in the text, or None."""
        return next(self._matches(text), None)

    def shared(self, text: str) -> dict[str, str]:
        """Return {test: first shared n-gram} for all tests that overlap with the text."""
        first: dict[str, str] = {}
        for name, run in self._matches(text):
            first.setdefault(name, run)
        return first

    def _matches(self, text: str) -> Iterator[tuple[str, str]]:
        words = _words(text)
        for length in sorted(self._runs, reverse=True):
            runs = self._runs[length]
            yield from ((name, run) for run in _runs(words, length) for name in runs.get(run, ()))


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


def _runs(words: list[str], length: int) -> Iterator[str]:
    return (" ".join(words[at : at + length]) for at in range(len(words) - length + 1))
