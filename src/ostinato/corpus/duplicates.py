"""Exact and near duplicates. The first copy is kept, so the result depends only on the files and their order.

Source: MinHash over word shingles with locality-sensitive hashing (Broder 1997), as BigCode deduplicates code (2301.03988).
"""

from __future__ import annotations

import re
from typing import Any

from ostinato.core.errors import BadConfig
from ostinato.corpus.document import Document

SHINGLE = 5  # words
_PERMUTATIONS = 128  # the estimate's standard error at a similarity of 0.7 is 0.04
# weights of false positives and false negatives: each candidate is compared, so a false positive is cheap
_MISSES = (
    0.1,
    0.9,
)
_WORDS = re.compile(r"\w+")


def shingles(text: str) -> set[str]:
    """Every run of five words; the whole text if it has fewer."""
    words = _WORDS.findall(text)
    return {" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))}


class CopyFinder:
    """Finds the earlier file that a file is a copy of.

    Args:
        near: the similarity from which a file counts as a copy; 1: exact copies only.

    Raises BadConfig if `datasketch` is missing and `near` is below 1.

    Example: ``CopyFinder(0.7).of(document)`` is ``"tabulate-0.9.0/tabulate.py"``, or "" for a new one.
    """

    def __init__(self, near: float) -> None:
        self._near = near
        self._exact: dict[int, str] = {}
        self._names: list[str] = []
        self._hashes: list[Any] = []
        self._index: Any = None
        if near < 1:
            try:
                from datasketch import MinHashLSH
            except ImportError as error:
                raise BadConfig(
                    "finding near copies needs datasketch: pip install 'ostinato[corpus]', or give --near 1 for exact copies only"
                ) from error
            self._index = MinHashLSH(threshold=near, num_perm=_PERMUTATIONS, weights=_MISSES)

    def of(self, document: Document) -> str:
        """The name of the earlier file that this one copies, or "" for a new file, which is then remembered."""
        name = f"{document.source}/{document.path}"
        if known := self._exact.get(document.digest):
            return known
        if self._index is not None:
            found = self._similar(document.text)
            if found:
                return found
            self._index.insert(len(self._names) - 1, self._hashes[-1], check_duplication=False)
            self._names[-1] = name
        self._exact[document.digest] = name
        return ""

    def _similar(self, text: str) -> str:
        from datasketch import MinHash

        hashed = MinHash(num_perm=_PERMUTATIONS)
        hashed.update_batch([each.encode() for each in shingles(text)])
        for candidate in sorted(self._index.query(hashed)):
            if hashed.jaccard(self._hashes[candidate]) >= self._near:
                return self._names[candidate]
        self._hashes.append(hashed)
        self._names.append("")
        return ""
