"""Finds the lines of a text that continue in a later version of it. Pure.

A line is identified by its text and its place, never by its text alone: an equal line elsewhere is another line. Two lines are the same
if they differ only in white space or in how their tokens are broken into lines, and if one of these holds: a neighbour continues, too;
both are at the same offset of a changed part that has as many lines as before; they, or they and their neighbours, have enough letters
and digits to be no coincidence. Lines without a letter or digit (blank, a lone bracket) have no identity at all.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import islice

_TOKEN = re.compile(r"\w+|[^\w\s]")
_SOLID = re.compile(r"[^\W_]")
_TELLING = 16  # letters and digits that are no coincidence within a changed part
_MOVED = 40  # ... and anywhere in the file: git blame's own measure for lines that were copied
_MOST_CELLS = 200_000  # of the table that aligns a changed part; beyond it the lines count as changed
_MOST_WRAPPED = 400  # lines of a changed part that is searched for other line breaks
_MOST_STARTS = 20  # lines of it at which a match may begin
_LONGEST_GROUP = 500  # tokens
_REMEMBERED = 200  # characters of a line that is likely to be seen again
_CLOSERS = frozenset(")]}")

Gap = tuple[int, int, int, int]  # start and end among the old, start and end among the new
Keys = Sequence[Hashable]


def counts(line: str) -> bool:
    """True if a line has a letter or digit: only such lines are counted. Example: ``counts("}") is False``"""
    return _SOLID.search(line) is not None


def key(line: str) -> tuple[str, ...]:
    """A line's tokens, that is, the line without its white space. Example: ``key("x=1") == ("x", "=", "1")``"""
    return _known_key(line) if len(line) <= _REMEMBERED else _key(line)


def _key(line: str) -> tuple[str, ...]:
    return tuple(_TOKEN.findall(line))


def telling(lines: Iterable[str]) -> bool:
    """True if consecutive lines have enough letters and digits to be no coincidence where their surroundings match."""
    return sum(_weight(line) for line in lines) >= _TELLING


def _weight(line: str) -> int:
    return _known_solids(line) if len(line) <= _REMEMBERED else _solids(line)


def _solids(line: str) -> int:
    return len(_SOLID.findall(line))


# of one file's lines and the next version's; a line of a megabyte would take fifty with its tokens
_known_key, _known_solids = lru_cache(maxsize=1 << 16)(_key), lru_cache(maxsize=1 << 16)(_solids)


def carry(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, ...]]:
    """For each new line, the indices of the old lines that continue in it: none, one, or several if lines were joined.

    An old line that was broken into several continues in each of them.

    Args:
        old: the lines of a text, without line ends.
        new: the lines of its later version.

    Example: ``carry(["x = 1", "}"], ["if y:", "    x = 1", "}"]) == [(), (0,), ()]``
    """
    solid_old = [i for i, line in enumerate(old) if counts(line)]
    solid_new = [j for j, line in enumerate(new) if counts(line)]
    lines_old, lines_new = [old[i] for i in solid_old], [new[j] for j in solid_new]
    pairs = _pairs(lines_old, lines_new)
    found = {solid_new[j]: solid_old[i] for j, i in pairs.items()}
    carried: list[tuple[int, ...]] = [(found[j],) if j in found else () for j in range(len(new))]
    for olds, news in _wrapped(old, new, found):
        for j in news:
            carried[j] = tuple(i for i in olds if counts(old[i])) if counts(new[j]) else ()
    taken = {i for olds in carried for i in olds}
    left_old = [k for k, i in enumerate(solid_old) if i not in taken]
    left_new = [k for k, j in enumerate(solid_new) if not carried[j]]
    for i, j in _moved(lines_old, lines_new, left_old, left_new):
        carried[solid_new[j]] = (solid_old[i],)
    return carried


def _pairs(old: list[str], new: list[str]) -> dict[int, int]:
    """Lines that are equal except for white space, in order: new index to old index."""
    found: dict[int, int] = {}
    leaves = _anchored((0, len(old), 0, len(new)), old, new, old, found)
    if not leaves:
        return found
    keys_old, keys_new = [key(line) for line in old], [key(line) for line in new]
    for leaf in leaves:
        for gap in _anchored(leaf, keys_old, keys_new, old, found):
            _align(gap, old, keys_old, keys_new, found)
    return found


def _anchored(gap: Gap, old: Keys, new: Keys, lines: list[str], found: dict[int, int]) -> list[Gap]:
    """Match common ends and lines that occur once, part by part; returns the parts that have neither."""
    leaves: list[Gap] = []
    todo = [gap]
    while todo:
        part = todo.pop()
        # before the ends, where a short line may match another line by chance
        anchors = _anchors(part, old, new, lines)
        if not anchors:
            part = _trimmed(part, old, new, found)
            anchors = _anchors(part, old, new, lines)
        i1, i2, j1, j2 = part
        if anchors:
            found.update((j, i) for i, j in anchors)
            edges = [(i1 - 1, j1 - 1), *anchors, (i2, j2)]
            todo.extend((a + 1, c, b + 1, d) for (a, b), (c, d) in zip(edges, edges[1:]))
        elif i1 < i2 and j1 < j2:
            leaves.append(part)
    return leaves


def _trimmed(gap: Gap, old: Keys, new: Keys, found: dict[int, int]) -> Gap:
    i1, i2, j1, j2 = gap
    while i1 < i2 and j1 < j2 and old[i1] == new[j1]:
        found[j1] = i1
        i1, j1 = i1 + 1, j1 + 1
    while i1 < i2 and j1 < j2 and old[i2 - 1] == new[j2 - 1]:
        i2, j2 = i2 - 1, j2 - 1
        found[j2] = i2
    return i1, i2, j1, j2


def _anchors(gap: Gap, old: Keys, new: Keys, lines: list[str]) -> list[tuple[int, int]]:
    """Lines that occur once in both and share a neighbour, reduced to the heaviest subset whose pairs do not cross."""
    i1, i2, j1, j2 = gap
    times_old, times_new = Counter(old[i1:i2]), Counter(new[j1:j2])
    places = {new[j]: j for j in range(j1, j2) if times_new[new[j]] == 1}
    once = [(i, places[old[i]]) for i in range(i1, i2) if times_old[old[i]] == 1 and old[i] in places]
    near = [(i, j) for i, j in once if _neighbours(old, new, i, j)]
    return _heaviest(near, [_weight(lines[i]) for i, _ in near])


def _neighbours(old: Keys, new: Keys, i: int, j: int) -> bool:
    before = old[i - 1] == new[j - 1] if i and j else i == j
    after = old[i + 1] == new[j + 1] if i + 1 < len(old) and j + 1 < len(new) else len(old) - i == len(new) - j
    return before or after


def _heaviest(pairs: list[tuple[int, int]], weights: list[int]) -> list[tuple[int, int]]:
    """Of pairs with increasing first numbers, the heaviest subset with increasing second numbers."""
    ranks = sorted(j for _, j in pairs)
    best: list[tuple[int, int]] = [(0, -1)] * (len(pairs) + 1)  # a Fenwick tree of (weight, last pair)
    before: list[int] = []
    for number, ((_, j), weight) in enumerate(zip(pairs, weights)):
        rank = bisect_left(ranks, j)
        top, last, at = 0, -1, rank
        while at > 0:
            top, last = max((top, last), best[at])
            at -= at & -at
        before.append(last)
        at = rank + 1
        while at < len(best):
            best[at] = max(best[at], (top + weight, number))
            at += at & -at
    chain: list[tuple[int, int]] = []
    at = len(pairs)
    top, last = 0, -1
    while at > 0:
        top, last = max((top, last), best[at])
        at -= at & -at
    while last >= 0:
        chain.append(pairs[last])
        last = before[last]
    return chain[::-1]


def _align(gap: Gap, lines: list[str], old: Keys, new: Keys, found: dict[int, int]) -> None:
    """Match a part whose lines all repeat or share no neighbour: the heaviest common lines, if text or place identifies them."""
    i1, i2, j1, j2 = gap
    if (i2 - i1) * (j2 - j1) > _MOST_CELLS:
        return
    even = i2 - i1 == j2 - j1
    pairs = _common(gap, lines, old, new, even=even)
    run: list[tuple[int, int]] = []
    for pair in [*pairs, (-1, -1)]:
        if run and pair != (run[-1][0] + 1, run[-1][1] + 1):
            (first_i, first_j), (last_i, last_j) = run[0], run[-1]
            told = sum(_weight(lines[i]) for i, _ in run) >= _TELLING
            beside = found.get(first_j - 1, -2) == first_i - 1 or found.get(last_j + 1, -2) == last_i + 1
            if told or beside or (even and first_i - i1 == first_j - j1):
                found.update((j, i) for i, j in run)
            run = []
        run.append(pair)


def _common(gap: Gap, lines: list[str], old: Keys, new: Keys, *, even: bool) -> list[tuple[int, int]]:
    i1, i2, j1, j2 = gap
    width = j2 - j1
    table = [[0] * (width + 1)]
    gains = [2 * min(_weight(lines[i]), 40) for i in range(i1, i2)]
    for i in range(i2 - 1, i1 - 1, -1):
        below, row = table[-1], [0] * (width + 1)
        for j in range(width - 1, -1, -1):
            row[j] = max(below[j], row[j + 1])
            if old[i] == new[j1 + j]:
                same_place = even and i - i1 == j
                row[j] = max(row[j], below[j + 1] + gains[i - i1] + same_place)
        table.append(row)
    table.reverse()
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < i2 - i1 and j < width:
        same_place = even and i == j
        if old[i1 + i] == new[j1 + j] and table[i][j] == table[i + 1][j + 1] + gains[i] + same_place:
            pairs.append((i1 + i, j1 + j))
            i, j = i + 1, j + 1
        elif table[i][j] == table[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _wrapped(old: Sequence[str], new: Sequence[str], found: dict[int, int]) -> list[tuple[tuple[int, ...], range]]:
    """Lines whose tokens are now in other lines, in the same order: the old lines, and the new lines that hold their tokens."""
    groups: list[tuple[tuple[int, ...], range]] = []
    edges = [(-1, -1), *sorted((i, j) for j, i in found.items()), (len(old), len(new))]
    for (a, b), (c, d) in zip(edges, edges[1:]):
        if 0 < c - a - 1 <= _MOST_WRAPPED and 0 < d - b - 1 <= _MOST_WRAPPED:
            groups += _wrapped_in(_flat(old, a + 1, c), _flat(new, b + 1, d))
    return groups


def _flat(lines: Sequence[str], start: int, end: int) -> list[tuple[str, int]]:
    """Tokens and the lines that they are in, without commas before a closing bracket, which formatters add and remove."""
    flat = [(token, i) for i in range(start, end) for token in key(lines[i])]
    return [each for each, after in zip(flat, [*flat[1:], ("", -1)]) if not (each[0] == "," and after[0] in _CLOSERS)]


def _wrapped_in(old: list[tuple[str, int]], new: list[tuple[str, int]]) -> list[tuple[tuple[int, ...], range]]:
    groups: list[tuple[tuple[int, ...], range]] = []
    starts: dict[str, list[int]] = {}
    for at, (token, _) in enumerate(new):
        if _ends(new, at):
            starts.setdefault(token, []).append(at)
    ended_old = ended_new = at = 0
    while at < len(old):
        after = (start for start in starts.get(old[at][0], ()) if start >= ended_new)
        places = islice(after, _MOST_STARTS)
        start, size = next(((start, size) for start in places if (size := _same(old, at, new, start))), (0, 0))
        beside = (at == ended_old and start == ended_new) or (at + size == len(old) and start + size == len(new))
        weight = sum(_weight(token) for token, _ in old[at : at + size])
        if size and (beside or weight >= _TELLING):
            if weight:
                lines = tuple(dict.fromkeys(i for _, i in old[at : at + size]))
                groups.append((lines, range(new[start][1], new[start + size - 1][1] + 1)))
            ended_old, ended_new = at + size, start + size
            at += size
        else:
            at = next((later for later in range(at + 1, len(old)) if _ends(old, later)), len(old))
    return groups


def _same(old: list[tuple[str, int]], at: int, new: list[tuple[str, int]], start: int) -> int:
    """How many tokens agree until both are at the end of a line; 0 if they differ before that."""
    size = 0
    longest = min(len(old) - at, len(new) - start, _LONGEST_GROUP)
    while size < longest and old[at + size][0] == new[start + size][0]:
        size += 1
        if _ends(old, at + size) and _ends(new, start + size):
            return size
    return 0


def _ends(flat: list[tuple[str, int]], at: int) -> bool:
    """True at the start of a line, which is the end of the one before."""
    return at in (0, len(flat)) or flat[at][1] != flat[at - 1][1]


def _moved(old: list[str], new: list[str], left_old: list[int], left_new: list[int]) -> list[tuple[int, int]]:
    """Runs of lines that were removed in one place and inserted, unchanged except for white space, in another."""
    keys_old, keys_new = {i: key(old[i]) for i in left_old}, {j: key(new[j]) for j in left_new}
    times_old, times_new = Counter(keys_old.values()), Counter(keys_new.values())
    places = {words: j for j, words in keys_new.items() if times_new[words] == 1}
    taken_old: set[int] = set()
    taken_new: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for i, words in keys_old.items():
        if i in taken_old or times_old[words] != 1 or words not in places or places[words] in taken_new:
            continue
        j, first, last = places[words], 0, 1
        while keys_old.get(i + first - 1, 0) == keys_new.get(j + first - 1, 1) and i + first - 1 not in taken_old:
            first -= 1
        while keys_old.get(i + last, 0) == keys_new.get(j + last, 1) and i + last not in taken_old:
            last += 1
        run = [(i + step, j + step) for step in range(first, last)]
        if sum(map(_weight, {old[each] for each, _ in run})) >= _MOVED and not any(
            each in taken_new for _, each in run
        ):
            pairs += run
            taken_old.update(each for each, _ in run)
            taken_new.update(each for _, each in run)
    return pairs
